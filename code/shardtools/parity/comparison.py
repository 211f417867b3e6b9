"""The comparison of all ranks' matches, which finds the first wrong tensor."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from . import cross_rank
from .causes import UNEXPLAINED, RankValue, WrongTensor, fit_rank_factors
from .core import STRICT_PHASES, Matcher, PartMatch
from .hints import collect_hints
from .hooks import INITIAL_STEP, PHASES, Key
from .noise import get_tolerance
from .record import Record
from .report import Finding, Report
from .state_causes import explain_tensor


class Comparison:
    """The comparison of all ranks' matches, in the order of the plain computation."""

    def __init__(self, plain: Record, ranks: list[Matcher], end: int | None = None):
        self.plain, self.ranks = plain, ranks
        self.begin, self.end = ranks[0].first_step, plain.steps if end is None else end
        for matcher in ranks:
            matcher.plain = plain
        self.report = Report(len(ranks), cut_description=plain.cut_description)
        self.keys = self._sort_keys()
        self.partial_sums: list[tuple[Key, str]] = []  # not all-reduced
        self.has_right_gradients = cache(
            partial(cross_rank.has_right_gradients, plain=plain, ranks=ranks)
        )

    def run(self) -> Report:
        """Compare all tensors up to the first wrong phase; see `Report`."""
        steps = {matcher.steps for matcher in self.ranks}
        if steps != {self.end}:  # steps of ranks that skip one cannot be matched
            counts = ", ".join(f"rank {m.rank} took {m.steps}" for m in self.ranks)
            message = f"the plain program took {self.end} optimizer steps, but {counts}"
            bad = [m.rank for m in self.ranks if m.steps != self.end]
            step = cross_rank.find_skipped_step(self.ranks)
            self._add_finding(Key(step, "update", ""), bad, message)
            return self.report
        for key in self.keys:
            first = self.report.first_finding
            if first and first.key[:2] != key[:2]:
                break  # later differences may be consequences
            self._compare_key(key)
        for phase, used in (x for m in self.ranks for x in m.tolerance_used.items()):
            largest = max(self.report.tolerance_used.get(phase, 0.0), used)
            self.report.tolerance_used[phase] = largest
        self.report.hints = collect_hints(self)
        return self.report

    def _sort_keys(self) -> list[Key]:
        """Return keys by step and phase: modules by last call, gradients reversed."""
        first, steps = self.begin or INITIAL_STEP, range(self.begin, self.end)
        keys = (k for k in self.plain.parts
                if (k.step == first if k.phase == "weights" else k.step in steps))  # fmt: skip
        numbers = {key: n for n, key in enumerate(keys)}
        last = {key: -n if key.phase == "gradient" else n for key, n in numbers.items()}
        return sorted(numbers, key=lambda k: (k.step, PHASES.index(k.phase), last[k]))

    def _compare_key(self, key: Key) -> None:
        if key.phase == "samples":
            if message := cross_rank.check_samples(key, self.plain, self.ranks):
                self._add_finding(key, [], message)
            return
        full = self.plain.full_tensor(key)
        parts = [
            (matcher, number, match)
            for matcher in self.ranks
            for number, match in enumerate(matcher.matches.get(key, ()))
        ]
        is_lenient = key.phase in ("forward", "backward")
        has_none = full is None or not full.numel()
        if has_none or (is_lenient and (self.plain.is_scalar(key) or not parts)):
            self.report.skipped.append(key)
            return
        dtypes = [match.part.value.dtype for _, _, match in parts]
        tols = [get_tolerance(self.plain, key, dtype) for dtype in dtypes]
        if not all(tol.is_comparable for tol in tols):
            self.report.num_undecided += 1
            return
        self.report.num_compared += 1
        misfits = [part for part in parts if not part[2].is_found]
        if is_lenient:
            self._compare_leniently(key, tols, parts, misfits)
        elif missing := [m.rank for m in self.ranks if cross_rank.is_missing(key, m)]:
            self._add_finding(key, missing, "is missing")
        elif misfits:
            self._explain_misfits(key, parts, misfits)
        elif key.phase == "weights" and (
            message := cross_rank.describe_missing_numbers(key, full, self.ranks)
        ):
            self._add_finding(key, [], message)

    def _compare_leniently(
        self, key: Key, tols: list, parts: list, misfits: list
    ) -> None:  # fmt: skip
        """Compare outputs or their gradients, which may be partial sums."""
        has_children = partial(cross_rank.has_all_children, key, self.plain)
        misfits = [misfit for misfit in misfits if has_children(misfit[0])]
        given = key, tols[0], self.ranks
        if misfits and (groups := cross_rank.find_partial_sum_groups(*given, misfits)):
            self.partial_sums.append((key, groups))
            misfits = []
        missing = "" if misfits else cross_rank.describe_missing_rows(*given)
        if (misfits or missing) and self.has_right_gradients(key.step):
            self.report.unplaced.append(key)
        elif misfits:
            self._explain_misfits(key, parts, misfits)
        elif missing:
            self._add_finding(key, [], missing)

    def _explain_misfits(
        self, key: Key, parts: list, misfits: list[tuple[Matcher, int, PartMatch]]
    ) -> None:
        """Explain parts that fit nowhere; wrong outputs get their likeliest places."""
        values, full = [], self.plain.full_tensor(key)
        for matcher, number, match in parts:
            value, call = match.part.value, matcher.get_call(key, match.part)
            is_wrong = any(match is misfit for *_, misfit in misfits)
            place = matcher.guess_place(key, match, number) if is_wrong else match.place
            if place is None and is_wrong:
                shapes = f"{list(value.shape)} cannot be a part of shape {list(full.shape)}"
                self._add_finding(key, [matcher.rank], f"shape {shapes}")
                return
            if place is None:
                continue
            if key.phase == "forward" and is_wrong:
                call.output_places[key.name] = place
            wanted = place.take_from(full).double().view(value.shape)
            has_factor = key.phase == "backward" and call.factor is not None
            found = wanted
            if not match.is_found:
                found = value.double() / (call.factor if has_factor else 1.0)
            result = found, wanted, place, is_wrong, match.part.local_samples
            values.append(RankValue(matcher.rank, *result))
        first = parts[0][2].part.value
        tol = get_tolerance(self.plain, key, first.dtype)
        case = WrongTensor(key, self.plain, self.ranks, tol, values)
        bad, error = sorted({value.rank for value in case.wrong_values}), case.error
        allowed = tol.get_explained(error)
        if key.phase in STRICT_PHASES or self.report.is_equal:
            factors = fit_rank_factors(case)
            self._add_finding(key, bad, explain_tensor(case), error, allowed, factors)
        else:  # of outputs, explain only the first
            self._add_finding(key, bad, UNEXPLAINED, error, allowed)

    def _add_finding(self, key: Key, bad: list[int], message: str, *more: Any) -> None:
        self.report.findings.append(Finding(key, bad, message, *more))
