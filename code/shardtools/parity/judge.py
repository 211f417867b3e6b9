"""The judge of all ranks' matches: finds the first wrong tensor in the order of computation."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from . import across
from .carried import in_words
from .causes import ANOTHER, Case, Value, factors
from .clues import clues
from .core import ENDS, Matcher, Seen
from .noise import tolerance
from .record import Record
from .recording import BEFORE, PHASES, Key
from .report import Finding, Report


class Judge:
    """The verdict of all ranks' matchers, in the order of the plain computation."""

    def __init__(self, plain: Record, ranks: list[Matcher], end: int | None = None):
        self.plain, self.ranks = plain, ranks
        self.begin, self.end = ranks[0].begins, plain.steps if end is None else end
        for matcher in ranks:
            matcher.plain = plain
        self.report = Report(len(ranks), fewer=plain.fewer)
        self.order = self._in_time()
        self.addends: list[tuple[Key, str]] = []  # partial sums, not all-reduced
        self.gradients_fit = cache(partial(across.gradients_fit, plain=plain, ranks=ranks))

    def judge(self) -> Report:
        """Compare all tensors up to the first wrong phase; see `Report`."""
        steps = {matcher.steps for matcher in self.ranks}
        if steps != {self.end}:  # steps of ranks that skip one cannot be matched
            took = ", ".join(f"rank {m.rank} {m.steps}" for m in self.ranks)
            words = f"the plain program took {self.end} optimizer steps, {took}: a skip?"
            bad = [m.rank for m in self.ranks if m.steps != self.end]
            self._say(Key(across.skipped(self.ranks), "update", ""), bad, words)
            return self.report
        for key in self.order:
            if self.report.findings and self.report.first.key[:2] != key[:2]:
                break  # later differences may be consequences
            self._one(key)
        for matcher in self.ranks:
            for phase, off in matcher.worst.items():
                self.report.worst[phase] = max(self.report.worst.get(phase, 0.0), off)
        self.report.clues = clues(self)
        return self.report

    def _in_time(self) -> list[Key]:
        """Return keys by step and phase: modules by last call, gradients reversed."""
        first, steps = self.begin or BEFORE, range(self.begin, self.end)
        mine = (k for k in self.plain.parts
                if (k.step == first if k.phase == "weights" else k.step in steps))  # fmt: skip
        place = {key: n for n, key in enumerate(mine)}
        last = {key: -n if key.phase == "gradient" else n for key, n in place.items()}
        return sorted(place, key=lambda k: (k.step, PHASES.index(k.phase), last[k]))

    def _one(self, key: Key) -> None:
        if key.phase == "samples":
            if words := across.samples(key, self.plain, self.ranks):
                self._say(key, [], words)
            return
        whole = self.plain.whole(key)
        parts = [(m, n, s) for m in self.ranks for n, s in enumerate(m.seen.get(key, ()))]
        inside = key.phase in ("forward", "backward")
        if whole is None or not whole.numel() or (inside and (self.plain.scalar(key) or not parts)):
            self.report.left_out.append(key)
            return
        near = [tolerance(self.plain, key, s.part.value.dtype) for _, _, s in parts]
        if not all(each.decides for each in near):
            self.report.undecided += 1
            return
        self.report.compared += 1
        left = [one for one in parts if not one[2].fits]
        if inside:
            left = [one for one in left if across.complete(key, self.plain, one[0])]
            if left and (who := across.summed(key, near[0], self.ranks, left)):
                self.addends.append((key, who))
                left = []
            gone = "" if left else across.on_no_rank(key, near[0], self.ranks)
            if (left or gone) and self.gradients_fit(key.step):
                self.report.unplaced.append(key)
            elif left:
                self._wrong(key, parts, left)
            elif gone:
                self._say(key, [], gone)
            return
        missing = [m.rank for m in self.ranks if across.lacks(key, m)]
        if missing:
            self._say(key, missing, "is not there")
        elif left:
            self._wrong(key, parts, left)
        elif key.phase == "weights" and (
            words := across.numbers_on_no_rank(key, whole, self.ranks)
        ):
            self._say(key, [], words)

    def _wrong(self, key: Key, parts: list, left: list[tuple[Matcher, int, Seen]]) -> None:
        """Explain the parts that fit nowhere; wrong outputs get their likeliest places."""
        values = []
        for matcher, number, seen in parts:
            wrong = any(seen is one for *_, one in left)
            place = matcher.guess(key, seen, number) if wrong else seen.place
            if place is None and wrong:
                shapes = f"{list(seen.part.value.shape)} of {list(self.plain.whole(key).shape)}"
                self._say(key, [matcher.rank], f"its shape {shapes} is no part of the whole")
                return
            if place is None:
                continue
            if key.phase == "forward" and wrong:
                matcher.calls[key.step, seen.part.call].stood[key.name] = place
            wanted = place.of(self.plain.whole(key)).double().view(seen.part.value.shape)
            free = matcher.calls[key.step, seen.part.call].factor
            base = free if key.phase == "backward" and free is not None else 1.0
            found = wanted if seen.fits else seen.part.value.double() / base
            values.append(Value(matcher.rank, found, wanted, place, wrong, seen.part.local))
        near = tolerance(self.plain, key, parts[0][2].part.value.dtype)
        case = Case(key, self.plain, self.ranks, near, values)
        bad, error = sorted({value.rank for value in case.wrong}), case.error
        if key.phase in ENDS or self.report.equal:  # inside, explain only the first
            self._say(key, bad, in_words(case), error, near.explains(error), factors(case))
        else:
            self._say(key, bad, ANOTHER, error, near.explains(error))

    def _say(self, key: Key, bad: list[int], words: str, *more: Any) -> None:
        self.report.findings.append(Finding(key, bad, words, *more))
