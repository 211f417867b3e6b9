"""Do the parts of N ranks make the tensors of one process? And if not, which is the first wrong?

Three rules keep what is ambiguous from hiding a mistake:

1. Ends are strict. What the optimizer sees as a gradient, and what it makes of a weight, stands
   where the weight itself stood before the first step, with factor 1, on every rank that holds it.
   Weights are equal before any mistake can act, so where they stand is learned from the truth.
2. The inside is lenient, and only locates: no alarm while every gradient of the step is right. An
   output may stand anywhere, or be the sum of several ranks'; in backward each rank has one free
   factor, for it may divide its loss at the end. An output's gradient stands where the output did.
3. Of a weight all places that fit are kept (ones look alike). The set shrinks with every tensor
   that follows, and never grows.

`Matcher` works on each rank, tensor by tensor as they come, and keeps those that fit nowhere.
`Judge` sees what all of them found.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, islice
from typing import Any

from torch import Tensor

from . import across
from .carried import in_words
from .causes import ANOTHER, Case, Value, factors
from .clues import clues
from .noise import Tolerance, ratio, rms, tolerance
from .places import Place, by_columns, by_rows, by_twins, in_any_order, pieces, proposals
from .record import Record
from .recording import BEFORE, PHASES, Key, Part, Sink
from .report import Finding, Report

FEW = 16  # proposals: to say what is wrong with a misfit, or where misfits are the rule
PATIENCE = 8  # misfits of a phase and call after which no more proposals are tried
LOOSE = 1e-3  # where rounding explains more than that, an output fits at wrong places, too
ENDS = "gradient", "update"


@dataclass
class Seen:
    """A part on a rank. Its value is kept where it fits nowhere, else it is on torch's meta."""

    part: Part
    place: Place | None
    factor: float = 1.0  # of backward on this rank
    bits: int = 0  # a checksum: copies have the same

    @property
    def fits(self) -> bool:
        """Whether it was found in the plain run's tensor."""
        return self.part.value.is_meta


class Matcher(Sink):
    """A sink on one rank: finds each tensor's place in the plain run's."""

    def __init__(self, plain: Record, rank: int, ranks: int, begins: int = 0):
        self.plain, self.rank, self.ranks = plain, rank, ranks
        self.begins = begins  # how many steps a run that is resumed has behind it
        self.steps, self.watched, self.optimized = 0, False, False
        self.seen: dict[Key, list[Seen]] = {}
        self.owned: dict[tuple[str, int], list[Place]] = {}  # where a weight may stand
        self.known: dict[tuple, list[Place]] = defaultdict(list)  # where outputs stood, by shape
        self.stood: dict[tuple[Key, int], Place] = {}  # where an output stands: key, call
        self.factors: dict[tuple[int, int], float] = {}  # of backward: step, call
        self.clipped: dict[int, float] = {}  # of all gradients that are clipped later: by step
        self.misfits: Counter[tuple] = Counter()  # by step, phase and call
        self.worst: dict[str, float] = {}

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"plain": None}

    def forget(self, key: Key) -> bool:
        """As `Sink` says."""
        key = self.plain.name(key)
        unfit = any(not seen.fits for seen in self.seen.get(key, ()))
        return unfit and bool(self.seen.pop(key))

    def see(self, key: Key, part: Part) -> None:
        """Find its place; keep its value where there is none."""
        key = self.plain.name(key)
        seen = self.seen.setdefault(key, [])
        place, factor = self.place(key, part, len(seen))
        whole, bits = self.plain.whole(key), 0
        if place is not None or whole is None or not whole.numel():
            bits = across.checksum(part.value) if key.phase in ENDS else 0
            part = replace(part, value=part.value.to("meta"))
        else:
            self.misfits[*key[:2], part.call] += 1
            part = replace(part, value=part.value.clone())
        seen.append(Seen(part, place, factor, bits))

    def place(self, key: Key, part: Part, number: int) -> tuple[Place | None, float]:
        """Where it stands in the plain run's tensor, times which factor; `number`: of its key."""
        whole = self.plain.whole(key)
        if whole is None or not whole.numel() or key.phase == "samples":
            return None, 1.0
        near = tolerance(self.plain, key, part.value.dtype)
        if not part.value.numel():
            return next(proposals(part.value.shape, whole.shape)), 1.0
        if key.phase == "weights":
            return self._weight(key, part, number, near), 1.0
        if key.phase in ENDS:
            return self._end(key, part, number, near), 1.0
        if self.plain.scalar(key) and key.phase != "buffers":
            return None, 1.0
        if key.phase in ("forward", "buffers"):
            return self._output(key, part, near), 1.0
        return self._output_gradient(key, part, near)

    # Ends: strict

    def _weight(self, key: Key, part: Part, number: int, near: Tolerance) -> Place | None:
        """All places that fit are kept: those of constants are many. Same bits, if there are."""
        fits: list[tuple[float, Place]] = []
        for each in self._weight_places(part, near.whole):
            offs = ((near.off(part.value, p.of(near.whole)), p) for p in each)
            if fits := [(off, p) for off, p in offs if off <= 1]:
                break
        least = min((off for off, _ in fits), default=1.0)
        # Few bits are near to many things: of copies the exact ones are the right ones.
        kept = [p for off, p in fits if off == 0.0 or least > 0.0]
        self.owned[key.name, number] = kept
        return kept[0] if kept else None

    def _weight_places(self, part: Part, whole: Tensor) -> Iterator[Iterable[Place]]:
        value = part.value
        cut = proposals(value.shape, whole.shape, self.rank, part.start)
        yield chain(cut, pieces(value, whole, self.ranks) if value.shape != whole.shape else ())
        for free in (by_rows, by_columns):
            yield [p for p in [free(value, whole)] if p is not None]

    def _end(self, key: Key, part: Part, number: int, near: Tolerance) -> Place | None:
        """Where the weight stood, with factor 1."""
        owned = [p for p in self.owned.get((key.name, number), ()) if p.holds(part.value)]
        if part.unread or not near.decides:
            return owned[0] if owned else None
        factor = 1.0
        if part.unclipped and owned:  # one for all of the step
            free = ratio(part.value.view(owned[0].shape), owned[0].of(near.whole))
            factor = self.clipped.setdefault(key.step, free)
        fits = [p for p in owned if self._fits(key, part.value.view(p.shape), p, near, factor)]
        if fits:
            self.owned[key.name, number] = fits
        return fits[0] if fits else None

    # The inside: lenient

    def _output(self, key: Key, part: Part, near: Tolerance) -> Place | None:
        """Anywhere; where outputs of this shape stood before is the likeliest."""
        value, shape, whole = part.value, tuple(part.value.shape), tuple(near.whole.shape)
        known = self.known[part.call, shape, whole]
        # A part of a whole batch that comes call by call begins with its own rank's, or its call's.
        first = self.rank if whole[:1] == shape[:1] or not part.call else part.call
        anywhere = self._proposed(key, part, whole, first)
        place = self._best(
            key, value, chain(known, self._of_call(key, part, whole), anywhere), near
        )
        if place is None and self.misfits[*key[:2], part.call] < PATIENCE:
            place = self._best(key, value, in_any_order(value, near.whole, self.rank), near)
        if place is not None:
            self.stood[key, part.call] = place
            if not any(place.same(other) for other in known):
                known.append(place)
        return place

    def _proposed(
        self, key: Key, part: Part, whole: tuple[int, ...], first: int
    ) -> Iterator[Place]:
        """All of them, or a few where the step is lost already."""
        all_ = proposals(part.value.shape, whole, first, part.start)
        return all_ if self.misfits[*key[:2], part.call] < PATIENCE else islice(all_, FEW)

    def _of_call(self, key: Key, part: Part, whole: tuple[int, ...]) -> Iterator[Place | None]:
        """A part of what the same call of the plain run gave."""
        calls = list(islice(self.plain.calls(key), part.call + 1))
        if len(self.plain.parts[key]) > 1 and part.call < len(calls):
            shape, begin = calls[part.call]
            known = self.known[0, tuple(part.value.shape), tuple(shape)]
            for place in chain(known, proposals(part.value.shape, shape, self.rank, part.start)):
                yield place.later(begin, whole)

    def _best(
        self, key: Key, value: Tensor, places: Iterable[Place | None], near: Tolerance
    ) -> Place | None:
        """The best of those that fit, for loose tolerances fit wrong ones; else the first."""
        best, least = None, 1.0
        for place in places:
            if place is None:
                continue
            if (off := near.off(value, place.of(near.whole))) <= least:
                best, least = place, off
                if near.of_all < LOOSE:
                    break
        if best is not None and near.decides:
            self.worst[key.phase] = max(self.worst.get(key.phase, 0.0), least)
        return best

    def _output_gradient(self, key: Key, part: Part, near: Tolerance) -> tuple[Place | None, float]:
        """Where the output stood, if that is sure; times this rank's factor, the first one's."""
        value, shape = part.value, tuple(part.value.shape)
        stood = self.stood.get((key._replace(phase="forward"), part.call))
        if not near.decides:
            return stood, 1.0
        places: Iterable[Place] = [stood] if stood is not None and stood.shape == shape else []
        if not places or near.of_all >= LOOSE:
            whole = tuple(near.whole.shape)
            known = self.known[part.call, shape, whole]
            places = chain(places, known, self._proposed(key, part, whole, self.rank))
        mine = self.factors.get((key.step, part.call))
        tried = [mine, *(f for (step, _), f in self.factors.items() if step == key.step)]
        for place in places:
            free = [ratio(value, place.of(near.whole))] if mine is None else tried
            if free == [0.0] and self._fits(key, value, place, near):  # they say nothing of it
                return place, 1.0
            if factor := self._factor(key, part, place, near, free):
                return place, factor
        twins = self._twins(key, part, stood, near, tried) if stood is not None else ()
        for place, factor in twins:
            if self._factor(key, part, place, near, [factor]):
                return place, factor
        return None, 1.0

    def _factor(
        self, key: Key, part: Part, place: Place, near: Tolerance, tried: list[float]
    ) -> float:
        """The first factor with which it fits, which its call keeps; else 0."""
        for factor in dict.fromkeys(tried):
            if factor and self._fits(key, part.value, place, near, factor):
                self.factors.setdefault((key.step, part.call), factor)
                return factor
        return 0.0

    def _twins(
        self, key: Key, part: Part, stood: Place, near: Tolerance, tried: list[float | None]
    ) -> Iterator[tuple[Place, float]]:
        """Rows whose outputs are the same, and the gradients those that were found: with a factor.

        Where none is known, some rows tell one: those that stand where they should.
        """
        value, lost = part.value, self.misfits[*key[:2], part.call] >= PATIENCE
        output = tolerance(self.plain, key._replace(phase="forward"), value.dtype)
        if lost or stood.shape != value.shape or not value.dim():
            return
        alike = lambda p: output.off(p.of(output.whole), stood.of(output.whole)) <= 1  # noqa: E731
        if tried[0] is None:
            rows = [x.reshape(-1, x.shape[-1])[:FEW] for x in (value, stood.of(near.whole))]
            tried = [1.0, float(self.ranks), *(ratio(*pair) for pair in zip(*rows, strict=True))]
            for place in proposals(value.shape, near.whole.shape, self.rank):
                factor = ratio(value, place.of(near.whole))
                if near.off(value, place.of(near.whole), factor) <= 1 and alike(place):
                    yield place, factor
        outputs = stood.of(output.whole), output.whole
        for factor in dict.fromkeys(filter(None, tried)):
            place = by_twins(stood, outputs, (value / factor, near.whole))
            if place and alike(place):
                yield place, factor

    def _fits(
        self, key: Key, value: Tensor, place: Place, near: Tolerance, factor: float = 1.0
    ) -> bool:
        off = near.off(value, place.of(near.whole), factor)
        if off <= 1:
            self.worst[key.phase] = max(self.worst.get(key.phase, 0.0), off)
        return off <= 1

    def guess(self, key: Key, seen: Seen, number: int) -> Place | None:
        """The most similar place of what fits nowhere: to say what is wrong with it."""
        part, whole = seen.part, self.plain.whole(key)
        stood = self.stood.get((key._replace(phase="forward"), part.call))
        if key.phase == "backward" and stood is not None and stood.holds(part.value):
            return stood
        owned = [p for p in self.owned.get((key.name, number), ()) if p.holds(part.value)]
        if key.phase in ENDS:
            return owned[0] if owned else None
        known = self.known[part.call, tuple(part.value.shape), tuple(whole.shape)]
        likely = known or proposals(part.value.shape, whole.shape, self.rank, part.start)
        apart = lambda p: rms(part.value.double() - p.of(whole).double())  # noqa: E731
        return min(islice(likely, FEW), key=apart, default=None)


class Judge:
    """Sees what the matchers of all ranks found, in the order of the plain computation."""

    def __init__(self, plain: Record, ranks: list[Matcher], end: int | None = None):
        self.plain, self.ranks = plain, ranks
        self.begin, self.end = ranks[0].begins, plain.steps if end is None else end
        for matcher in ranks:
            matcher.plain = plain
        self.report = Report(len(ranks), fewer=plain.fewer)
        self.addends: list[tuple[Key, str]] = []  # outputs and gradients that nobody has summed
        self.gradients_fit = cache(partial(across.gradients_fit, plain=plain, ranks=ranks))

    def judge(self) -> Report:
        """Compare all; see `Report`."""
        steps = {matcher.steps for matcher in self.ranks}
        if steps != {self.end}:  # cannot be told apart
            took = ", ".join(f"rank {m.rank} {m.steps}" for m in self.ranks)
            words = f"the plain program took {self.end} optimizer steps, {took}: a skip?"
            bad = [m.rank for m in self.ranks if m.steps != self.end]
            self._say(Key(across.skipped(self.ranks, self.end), "update", ""), bad, words)
            return self.report
        for key in self.order():
            if self.report.findings and self.report.first.key[:2] != key[:2]:
                break  # what comes after may be its consequence
            self._one(key)
        for matcher in self.ranks:
            for phase, off in matcher.worst.items():
                self.report.worst[phase] = max(self.report.worst.get(phase, 0.0), off)
        self.report.dtypes = across.dtypes(self.order(), self.plain, self.ranks)
        self.report.clues = clues(self.report, self.addends, self.ranks, self.order())
        return self.report

    def order(self) -> list[Key]:
        """Time: phases of each step; modules by their last call; gradients from the end."""
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
        elif key.phase == "weights":
            if words := across.numbers_on_no_rank(key, whole, self.ranks):
                self._say(key, [], words)
        elif across.copies_differ([one for one in parts if not one[2].part.unread]):
            self.report.drifting.append(key)

    def _wrong(self, key: Key, parts: list, left: list[tuple[Matcher, int, Seen]]) -> None:
        """Say what is wrong with those that fit nowhere; they may count as they should be after."""
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
                matcher.stood[key, seen.part.call] = place
            wanted = place.of(self.plain.whole(key)).double().view(seen.part.value.shape)
            base = matcher.factors.get((key.step, seen.part.call), 1.0)
            base = base if key.phase == "backward" else 1.0
            found = wanted if seen.fits else seen.part.value.double() / base
            values.append(Value(matcher.rank, found, wanted, place, wrong, seen.part.local))
        near = tolerance(self.plain, key, parts[0][2].part.value.dtype)
        case = Case(key, self.plain, self.ranks, near, values)
        bad, error = sorted({value.rank for value in case.wrong}), case.error
        if key.phase in ENDS or self.report.equal:  # inside, the first alone is worth words
            self._say(key, bad, in_words(case), error, near.explains(error), factors(case))
        else:
            self._say(key, bad, ANOTHER, error, near.explains(error))

    def _say(self, key: Key, bad: list[int], words: str, *more: Any) -> None:
        self.report.findings.append(Finding(key, bad, words, *more))
