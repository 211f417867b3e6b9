"""Causes of a wrong tensor, in words: the first of CAUSES that fits the numbers explains it.

A new cause is a function of a `WrongTensor` that returns a sentence, or "" if it does not fit, and
a row of CAUSES. FACTOR_CAUSES lists possible reasons of a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .hooks import INITIAL_STEP, Key, Part, sample_values
from .noise import Tolerance, fit_factor, measure_difference, rms
from .places import Place, match_rows
from .record import Record
from .report import join_ranks

FACTOR_TOLERANCE = 0.01  # relative; factors that differ by less are the same
MAX_FIT_ERROR = 0.05  # relative error below which a fitted bias or weight decay explains a tensor
UNEXPLAINED = "is wrong for an unknown reason"


@dataclass
class RankValue:
    """One rank's part of a tensor, and its right value."""

    rank: int
    found: Tensor  # in float64; in backward, divided by its rank's factor
    wanted: Tensor  # in float64
    place: Place
    is_wrong: bool
    local_samples: Tensor | None  # samples of a gradient from each backward pass: [passes, samples]

    def take_part(self, full: Tensor) -> Tensor:
        """Return the numbers of another full tensor at this place, in float64."""
        return self.place.take_from(full).double().view(self.found.shape)


class WrongTensor:
    """A tensor that is wrong on some ranks."""

    def __init__(
        self, key: Key, plain: Record, ranks: Sequence[Any], tol: Tolerance, values: list[RankValue]
    ):
        self.key, self.plain, self.ranks = key, plain, ranks
        self.tolerance, self.values = tol, values
        self.wrong_values = [value for value in values if value.is_wrong]
        self.max_difference = max(3 * tol.overall, 1e-4)

    @property
    def error(self) -> float:
        """The largest difference, relative to the tensor's size."""
        size = self.tolerance.size
        return max(measure_difference(v.found, v.wanted, size)[0] for v in self.wrong_values)

    def is_close(self, one: Tensor, other: Tensor) -> bool:
        """Return True if two tensors are the same but for rounding."""
        if one.shape != other.shape:
            return False
        return measure_difference(one, other, rms(other))[0] <= self.max_difference

    def count_micro_batches(self) -> int:
        """Return the number of micro-batches in a step: calls of the least-called module."""
        outputs = [k for k in self.plain.parts if k[:2] == (self.key.step, "forward")]
        calls = [max(len(m.matches.get(key, ())) for m in self.ranks) for key in outputs]
        return min(filter(None, calls), default=1)

    def get_wrong_parts(self) -> dict[int, Part]:
        """Return the first part of each rank with a wrong value, by rank."""
        bad = {value.rank for value in self.wrong_values}
        return {m.rank: m.matches[self.key][0].part for m in self.ranks if m.rank in bad}

    def get_plain_tensor(self, **other: Any) -> Tensor | None:
        """Return another tensor of the plain run, whose key differs in the given fields."""
        key = self.key._replace(**other)
        return self.plain.full_tensor(key) if key in self.plain.parts else None


def is_same_factor(one: float, other: float) -> bool:
    """Return True if two factors agree within FACTOR_TOLERANCE."""
    return abs(one - other) <= FACTOR_TOLERANCE * max(abs(one), abs(other))


def is_uniform(factors: Iterable[float]) -> bool:
    """Return True if all factors agree with the first."""
    first, *others = [*factors] or [1.0]
    return all(is_same_factor(factor, first) for factor in others)


def format_spans(index: Tensor, most: int = 3) -> str:
    """Format sorted numbers as spans: 0 to 3, 8."""
    spans: list[list[int]] = []
    for i in index.tolist():
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    words = [f"{a}" if a == b else f"{a} to {b}" for a, b in spans[:most]]
    return ", ".join(words) + (", …" if len(spans) > most else "")


# Factors and their possible reasons, for n ranks and m micro-batches.
FACTOR_CAUSES: tuple[tuple[Callable[[int, int], float], str], ...] = (
    (lambda n, m: n, "a sum over {n} ranks that was not averaged"),
    (lambda n, m: 1 / n, "divided by the number of ranks ({n}) one time too many"),
    (lambda n, m: m, "a sum over {m} micro-batches that was not averaged"),
    (lambda n, m: 1 / m, "divided by the number of micro-batches ({m}) one time too many"),
)


def _explain_zero(case: WrongTensor) -> str:
    if any(value.found.any() for value in case.wrong_values):
        return ""
    return "is zero: the weight has not moved" if case.key.phase == "update" else "is zero"


def _explain_initial_weights(case: WrongTensor) -> str:
    if case.key.phase != "weights":
        return ""
    first, *others = case.wrong_values
    agree = all(case.is_close(v.found, first.found) for v in others)
    everywhere = agree and len(case.wrong_values) == len(case.values)
    why = "other weights were loaded" if everywhere else "rank 0's weights were not broadcast"
    return f"differ from the plain program's initial weights: a different seed, or {why}"


def _explain_dropout(case: WrongTensor) -> str:
    """Explain a different dropout mask: other zeros, and equal numbers where neither is zero."""
    parts = (match.part for m in case.ranks for match in m.matches.get(case.key, ()))
    if not any(part.used_rng for part in (*case.plain.parts[case.key], *parts)):
        return ""
    first = case.wrong_values[0]
    kept = (first.found != 0) & (first.wanted != 0)
    differ = (first.found != 0) != (first.wanted != 0)
    if not differ.any() or not case.is_close(first.found * kept, first.wanted * kept):
        return ""
    twins = {
        v.rank for v in case.values
        if v is first or not v.place.is_same(first.place)
        if v.found.shape == first.found.shape and torch.equal(v.found != 0, first.found != 0)
    }  # fmt: skip
    why = "start each step of both programs with the same seed, or set dropout to 0"
    if len(twins) > 1:
        same = f"ranks {join_ranks(sorted(twins))} use the same dropout mask"
        why = f"{same} (the same seed on all ranks?)"
    return f"random numbers are drawn here (dropout?), and differ from the plain program's: {why}"


def fit_rank_factors(case: WrongTensor) -> dict[int, float]:
    """Return each rank's scale factor if every wrong value is a multiple of the right one."""
    factors = {v.rank: fit_factor(v.found, v.wanted) for v in case.wrong_values}
    pairs = ((v, factors[v.rank]) for v in case.wrong_values)
    return factors if all(c and case.is_close(v.found, c * v.wanted) for v, c in pairs) else {}


def format_factors(by_rank: dict[int, float]) -> str:
    """Format the ranks' factors: 1.5 on rank 0, 2 on rank 1."""
    return ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in sorted(by_rank.items()))


def _explain_factor(case: WrongTensor) -> str:
    """Explain a value that is the right one times a factor, common or per rank."""
    if not (by_rank := fit_rank_factors(case)):
        return ""
    c, n, m = next(iter(by_rank.values())), len(case.ranks), case.count_micro_batches()
    if not is_uniform(by_rank.values()):
        if all(value.found.numel() == 1 for value in case.wrong_values):
            return ""  # any single number is a multiple of another
        own = f"is the right value times a different factor on each rank: {format_factors(by_rank)}"
        return _explain_missing_reduction(case) or own
    digits = 7 if f"{c:.4g}" == "1" else 4
    text = f"is {c:.{digits}g} times the right value"
    if case.key.phase == "update":
        return f"{text}: wrong step size (learning rate?)"
    started = [f for r in case.ranks for f in r.get_backward_factors(case.key.step)] or [1.0]
    loss_is_wrong = is_uniform([c * n, *started]) and not is_same_factor(c * n, 1.0)
    if case.key.phase == "gradient" and loss_is_wrong:
        return (
            f"{text}: averaged over {n} ranks correctly, but the loss was already scaled by "
            f"{c:.4g} (micro-batches? divided twice?)"
        )
    fits = [why for f, why in FACTOR_CAUSES if is_same_factor(c, f(n, m))]
    whys = [why.format(n=n, m=m) for why in fits if not is_same_factor(c, 1.0)]
    return f"{text}: {', or '.join(whys)}" if whys else text


def _explain_missing_reduction(case: WrongTensor) -> str:
    if len(case.values) < 2 or len({v.found.shape for v in case.values}) > 1:
        return ""
    by_place = _group_values(case.values, lambda one, other: one.place.is_same(other.place))
    if any(len(group) < 2 for group in by_place):
        return ""
    ranks = "ranks " + " | ".join(join_ranks([v.rank for v in group]) for group in by_place)
    sums = [(sum(v.found for v in g), g[0].wanted, len(g)) for g in by_place]
    if all(case.is_close(s, w) for s, w, _ in sums):
        return f"each rank has its own partial sum: not added up over {ranks}"
    if all(case.is_close(s / k, w) for s, w, k in sums):
        equal = lambda one, other: case.is_close(one.found, other.found)  # noqa: E731
        equals = [[v.rank for v in g] for group in by_place for g in _group_values(group, equal)]
        if all(len(group) > 1 for group in equals) and len(equals) > len(by_place):
            some = " | ".join(map(join_ranks, equals))
            return f"averaged over ranks {some} only, not over {ranks}"
        return f"each rank has its own value: not averaged over {ranks}"
    free = [fit_factor(s, w) for s, w, _ in sums]
    if all(c and case.is_close(s, c * w) for c, (s, w, _) in zip(free, sums, strict=True)):
        times = f"{free[0]:.4g} times the right value"
        return f"each rank has its own value; their sum over {ranks} is {times}"
    return ""


def _group_values(
    values: list[RankValue], is_equal: Callable[[RankValue, RankValue], bool]
) -> list[list[RankValue]]:
    groups: list[list[RankValue]] = []
    for value in values:
        group = next((g for g in groups if is_equal(g[0], value)), None)
        groups.append([value]) if group is None else group.append(value)
    return groups


def fit_pass_weights(case: WrongTensor) -> dict[int, list[float]]:
    """Return how often each backward's gradient is in the first wrong gradient, by rank.

    Returns {} if that is no such sum. Ranks that hold the same weight count together.
    """
    first = case.wrong_values[0]
    copies = [v for v in case.values if v is first or v.place.is_same(first.place)]
    wanted = sample_values(first.found)
    if any(v.local_samples is None or v.local_samples.shape[1:] != wanted.shape for v in copies):
        return {}
    # [samples, passes of all ranks]
    basis = torch.cat([v.local_samples.double() for v in copies]).T
    if basis.shape[1] >= basis.shape[0]:  # with so many unknowns anything would fit
        return {}
    fitted = torch.linalg.lstsq(basis, wanted[:, None], driver="gelsd").solution
    if not case.is_close((basis @ fitted)[:, 0], wanted):
        return {}
    floor = FACTOR_TOLERANCE * fitted.abs().max().item()
    each = [s if abs(s) > floor else 0.0 for s in fitted[:, 0].tolist()]
    counts = [len(v.local_samples) for v in copies]
    offsets = [sum(counts[:n]) for n in range(len(counts))]
    return {v.rank: each[b : b + n] for v, b, n in zip(copies, offsets, counts, strict=True)}


def _explain_accumulation(case: WrongTensor) -> str:
    """Explain a gradient that sums one rank's backward passes with unequal weights."""
    by_rank = fit_pass_weights(case)
    if all(is_same_factor(s, each[0]) for each in by_rank.values() for s in each):
        return ""
    weights = "; ".join(
        f"rank {rank}: {', '.join(f'{s:.3g}' for s in each[:8])}{', …' if len(each) > 8 else ''}"
        for rank, each in by_rank.items()
    )
    kept = {f"{s:.2g}" for each in by_rank.values() for s in each if s}
    lost = len(kept) == 1 and all(each[-1] and not each[0] for each in by_rank.values())
    why = "was the gradient divided, averaged or lost between two passes?"
    if lost:
        why = "the gradients of earlier passes are lost (zeroed? overwritten?)"
    unequal = f"sums the backward passes with unequal weights ({weights})"
    return f"{unequal}; all weights should be equal: {why}"


def _explain_unequal_ranks(case: WrongTensor) -> str:
    """Explain a gradient that is a sum of the ranks' own gradients, but not their mean."""
    by_rank = {rank: each[0] for rank, each in fit_pass_weights(case).items()}
    used = [rank for rank, share in by_rank.items() if share]
    if len(by_rank) < 2:
        return ""
    if len(used) == 1:
        return f"is rank {used[0]}'s own gradient: the other ranks' gradients are missing"
    if is_uniform(by_rank.values()):
        return ""
    weights = ", ".join(f"{s:.3g}" for s in by_rank.values())
    return (
        f"sums the ranks' gradients with unequal weights ({weights}); all weights should be equal: "
        "each gradient was clipped, or divided, before averaging"
    )


# Wide formats: an integer type of the same size, and the low bits that narrower formats leave zero.
NARROW_FORMATS = {
    torch.float32: (torch.int32, {"bfloat16": 16, "float16": 13}),
    torch.float64: (torch.int64, {"float32": 29, "bfloat16": 45, "float16": 42}),
}


def _explain_narrow_dtype(case: WrongTensor) -> str:
    """Explain a value, or a sum of a few values, that has only a narrower format's precision."""
    first, dtype = case.wrong_values[0], case.tolerance.full.dtype
    if dtype not in NARROW_FORMATS or not 3 * case.tolerance.overall < case.error < 0.1:
        return ""
    int_dtype, formats = NARROW_FORMATS[dtype]

    def count_zero_bits(x: Tensor, bits: int) -> float:
        return ((x.to(dtype).view(int_dtype) & (2**bits - 1)) == 0).double().mean().item()

    for name, zeros in formats.items():
        for sum_bits in (0, 9):  # a sum of two numbers mostly uses up to 9 bits more
            bits = max(1, zeros - sum_bits)
            share = max(count_zero_bits(first.found * n, bits) for n in (1, len(case.ranks)))
            if share > 0.9 and count_zero_bits(first.wanted, bits) < 0.5:
                return f"has only {name} precision: it was summed, sent or stored in {name}"
    return ""


def _explain_bias(case: WrongTensor) -> str:
    value = case.wrong_values[0]
    if value.found.dim() < 2 or case.key.phase != "forward":
        return ""
    rest = (value.found - value.wanted).reshape(-1, value.found.shape[-1])
    mean = rest.mean(0)
    if measure_difference(rest, mean.expand_as(rest), rms(rest))[0] > MAX_FIT_ERROR:
        return ""
    prefix = case.key.name.partition("[")[0]
    for key, parts in case.plain.parts.items():
        bias = parts[0].value.double()
        if key.phase != "weights" or key.name.rpartition(".")[0] != prefix:
            continue
        c = fit_factor(mean, bias) if bias.dim() == 1 and bias.shape == mean.shape else 0.0
        if c and measure_difference(mean, c * bias, rms(bias))[0] < MAX_FIT_ERROR:
            return f"{key.name} is added {1 + c:.3g} times"
    return "every row is off by the same amount"


def _explain_rows(case: WrongTensor) -> str:
    value, tol = case.wrong_values[0], case.tolerance
    if value.found.dim() < 2:
        return ""
    rows = (value.found - value.wanted).reshape(-1, value.found.shape[-1])
    wrong = rows.square().mean(-1).sqrt() > tol.worst_row * max(tol.size, 1e-300)
    spans = format_spans(wrong.nonzero().flatten())
    text = f"{int(wrong.sum())} of {len(wrong)} rows are wrong ({spans})"
    place = match_rows(value.found, tol.full)
    if place is not None and case.is_close(value.found, place.take_from(tol.full).double()):
        return f"{text}; the rows themselves are right, but in the wrong order"
    return text if 0 < wrong.sum() < len(wrong) else ""


def _explain_previous_step(case: WrongTensor) -> str:
    old = case.get_plain_tensor(step=case.key.step - 1) if case.key.step > 0 else None
    if old is None or old.shape != case.tolerance.full.shape:
        return ""
    value = case.wrong_values[0]
    old = value.take_part(old)
    if case.is_close(value.found, old):
        return "equals the previous step's value"
    both = case.is_close(value.found, value.wanted + old)
    return "is the right value plus the previous step's value (zero_grad?)" if both else ""


def _explain_weight_decay(case: WrongTensor) -> str:
    """Explain an update that is off by a multiple of the weight: weight decay."""
    weight = case.get_plain_tensor(step=INITIAL_STEP, phase="weights")
    if case.key.phase != "update" or case.key.step or weight is None:
        return ""
    value = case.wrong_values[0]
    rest, weight = value.found - value.wanted, value.take_part(weight)
    c = fit_factor(rest, weight)
    if not c or measure_difference(rest, c * weight, rms(c * weight))[0] > MAX_FIT_ERROR:
        return ""
    return f"is off by {c:.3g} times the weight: wrong weight decay"


def _explain_unknown(case: WrongTensor) -> str:
    first = case.wrong_values[0].found
    same = len(case.values) > 1 and all(case.is_close(v.found, first) for v in case.values)
    c = fit_factor(first, case.wrong_values[0].wanted)
    details = ["the value is the same on all ranks"] if same else []
    if c and not is_same_factor(c, 1.0):
        details.append(f"best fit: {c:.3g} times the right value")
    return "; ".join([UNEXPLAINED, *details])


CAUSES = (
    _explain_zero, _explain_initial_weights, _explain_dropout, _explain_narrow_dtype,
    _explain_factor, _explain_accumulation, _explain_missing_reduction, _explain_unequal_ranks,
    _explain_bias, _explain_rows, _explain_previous_step, _explain_weight_decay, _explain_unknown,
)  # fmt: skip
