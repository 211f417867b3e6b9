"""Causes of a wrong tensor, in words: the first of CAUSES that fits the numbers explains it.

A new cause is a function of a `Case` that returns a sentence, or "" if it does not fit, and a row
of CAUSES. FACTORS lists possible reasons of a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .noise import Tolerance, gap, ratio, rms
from .places import Place, by_rows
from .record import Record
from .recording import BEFORE, Key, Part, sampled
from .report import listed

SAME = 0.01  # factors that differ by less are the same
ANOTHER = "is another one"
SEEDS = "begin each step of both with the same seed, or drop nothing"


@dataclass
class Value:
    """One rank's part of a tensor, and its right value."""

    rank: int
    found: Tensor  # in float64; in backward, divided by its rank's factor
    wanted: Tensor  # in float64
    place: Place
    wrong: bool
    local: Tensor | None  # samples of a gradient from each backward pass: [passes, samples]


class Case:
    """A tensor that is wrong on some ranks."""

    def __init__(
        self, key: Key, plain: Record, ranks: Sequence[Any], near: Tolerance, values: list[Value]
    ):
        self.key, self.plain, self.ranks, self.near, self.values = key, plain, ranks, near, values
        self.wrong = [value for value in values if value.wrong]
        self.loose = max(3 * near.of_all, 1e-4)

    @property
    def error(self) -> float:
        """The largest difference, relative to the tensor's size."""
        return max(gap(v.found, v.wanted, self.near.size)[0] for v in self.wrong)

    def alike(self, one: Tensor, other: Tensor) -> bool:
        """Return True if two tensors are the same but for rounding."""
        return one.shape == other.shape and gap(one, other, rms(other))[0] <= self.loose

    def micro_batches(self) -> int:
        """Return the number of micro-batches in a step: calls of a module that is called least."""
        outputs = [k for k in self.plain.parts if k[:2] == (self.key.step, "forward")]
        calls = [max(len(m.seen.get(key, ())) for m in self.ranks) for key in outputs]
        return min(filter(None, calls), default=1)

    def made_by(self) -> dict[int, Part]:
        """Return the first part of each rank with a wrong value, by rank."""
        bad = {value.rank for value in self.wrong}
        return {m.rank: m.seen[self.key][0].part for m in self.ranks if m.rank in bad}

    def whole(self, **other: Any) -> Tensor | None:
        """Return another tensor of the plain run, whose key differs in the given fields."""
        key = self.key._replace(**other)
        return self.plain.whole(key) if key in self.plain.parts else None


def same(one: float, other: float) -> bool:
    """Return True if two factors agree within SAME."""
    return abs(one - other) <= SAME * max(abs(one), abs(other))


def all_same(factors: Iterable[float]) -> bool:
    """Return True if all factors agree within SAME of the first."""
    first, *others = [*factors] or [1.0]
    return all(same(factor, first) for factor in others)


def spans(index: Tensor, most: int = 3) -> str:
    """Format sorted numbers as spans: 0 to 3, 8."""
    found: list[list[int]] = []
    for i in index.tolist():
        if found and i == found[-1][1] + 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    said = [f"{a}" if a == b else f"{a} to {b}" for a, b in found[:most]]
    return ", ".join(said) + (", …" if len(found) > most else "")


# Factors and their possible reasons, for n ranks and m micro-batches.
FACTORS: tuple[tuple[Callable[[int, int], float], str], ...] = (
    (lambda n, m: n, "a sum over {n} ranks that was not averaged"),
    (lambda n, m: 1 / n, "divided by {n} ranks once too often"),
    (lambda n, m: m, "{m} micro-batches that were not averaged"),
    (lambda n, m: 1 / m, "divided by {m} micro-batches once too often"),
)


def _nothing(case: Case) -> str:
    if any(value.found.any() for value in case.wrong):
        return ""
    return "has not moved" if case.key.phase == "update" else "is zero"


def _start(case: Case) -> str:
    if case.key.phase != "weights":
        return ""
    first, *others = case.wrong
    agree = all(case.alike(v.found, first.found) for v in others)
    everywhere = agree and len(case.wrong) == len(case.values)
    why = "other weights were loaded" if everywhere else "rank 0's were not sent to all"
    return f"are other ones than the plain program begins with: another seed, or {why}"


def _dice(case: Case) -> str:
    """Explain a different dropout mask: other zeros, and equal numbers where neither is zero."""
    seen = (s.part for m in case.ranks for s in m.seen.get(case.key, ()))
    if not any(part.drew for part in (*case.plain.parts[case.key], *seen)):
        return ""
    first = case.wrong[0]
    kept = (first.found != 0) & (first.wanted != 0)
    elsewhere = (first.found != 0) != (first.wanted != 0)
    if not elsewhere.any() or not case.alike(first.found * kept, first.wanted * kept):
        return ""
    said = "random numbers are drawn here (dropout?), and not those of the plain program"
    twins = {
        v.rank for v in case.values
        if v is first or not v.place.same(first.place)
        if v.found.shape == first.found.shape and torch.equal(v.found != 0, first.found != 0)
    }  # fmt: skip
    if len(twins) > 1:
        who = listed(sorted(twins))
        return f"{said}: ranks {who} drop the same of their parts (one seed for all?)"
    return f"{said}: {SEEDS}"


def factors(case: Case) -> dict[int, float]:
    """Return each rank's scale factor if every wrong value is a multiple of the right one."""
    found = {v.rank: ratio(v.found, v.wanted) for v in case.wrong}
    right = (found[v.rank] and case.alike(v.found, found[v.rank] * v.wanted) for v in case.wrong)
    return found if all(right) else {}


def told(by_rank: dict[int, float]) -> str:
    """Format the ranks' factors."""
    return ", ".join(f"rank {rank} {factor:.4g}" for rank, factor in sorted(by_rank.items()))


def times(factor: float) -> str:
    """Format a factor, with more digits if it is near 1."""
    return f"{factor:.7g}" if f"{factor:.4g}" == "1" else f"{factor:.4g}"


def _factor(case: Case) -> str:
    """Explain a value that is the right one times a factor, common or per rank."""
    if not (by_rank := factors(case)):
        return ""
    c, n, m = next(iter(by_rank.values())), len(case.ranks), case.micro_batches()
    if not all_same(by_rank.values()):
        if all(value.found.numel() == 1 for value in case.wrong):
            return ""  # any single number is a multiple of another
        own = f"is the right one times a factor of each rank's own: {told(by_rank)}"
        return _not_summed(case) or own
    said = f"is {times(c)} times the right one"
    if case.key.phase == "update":
        return f"{said}: the step's size (learning rate?)"
    began = [f for r in case.ranks for f in r.factors(case.key.step)] or [1.0]
    already = all_same([c * n, *began]) and not same(c * n, 1.0)
    if case.key.phase == "gradient" and already:
        return (
            f"{said}: averaged over {n} ranks as it should be, but the loss was {c:.4g} times "
            "the right one already (micro-batches? a division done twice?)"
        )
    whys = [why.format(n=n, m=m) for f, why in FACTORS if same(c, f(n, m)) and not same(c, 1.0)]
    return f"{said}: {', or '.join(whys)}" if whys else said


def _not_summed(case: Case) -> str:
    """Explain ranks' own values that were not all-reduced, or not averaged."""
    if len(case.values) < 2 or len({v.found.shape for v in case.values}) > 1:
        return ""
    by_place = _grouped(case.values, lambda one, other: one.place.same(other.place))
    if any(len(group) < 2 for group in by_place):
        return ""
    who = " | ".join(listed([v.rank for v in group]) for group in by_place)
    sums = [(sum(v.found for v in g), g[0].wanted, len(g)) for g in by_place]
    if all(case.alike(s, w) for s, w, _ in sums):
        return f"each rank has an addend of its own, and nobody added them up over ranks {who}"
    if all(case.alike(s / k, w) for s, w, k in sums):
        equal = lambda one, other: case.alike(one.found, other.found)  # noqa: E731
        alone = [[v.rank for v in g] for group in by_place for g in _grouped(group, equal)]
        if all(len(ranks) > 1 for ranks in alone) and len(alone) > len(by_place):
            among = " | ".join(map(listed, alone))
            return f"averaged over ranks {among} alone, and not over {who}"
        return f"each rank has its own, and nobody averaged them over ranks {who}"
    free = [ratio(s, w) for s, w, _ in sums]
    if all(c and case.alike(s, c * w) for c, (s, w, _) in zip(free, sums, strict=True)):
        times = f"{free[0]:.4g} times the right one"
        return f"each rank has its own; their sum over ranks {who} is {times}"
    return ""


def _grouped(values: list[Value], alike: Callable[[Value, Value], bool]) -> list[list[Value]]:
    """Group values that are alike."""
    found: list[list[Value]] = []
    for value in values:
        mine = next((g for g in found if alike(g[0], value)), None)
        found.append([value]) if mine is None else mine.append(value)
    return found


def shares(case: Case) -> dict[int, list[float]]:
    """Return how often each backward's gradient is in the first wrong gradient, by rank.

    Returns {} if that is no such sum. Ranks that hold the same weight count together.
    """
    first = case.wrong[0]
    mates = [v for v in case.values if v is first or v.place.same(first.place)]
    wanted = sampled(first.found)
    if any(v.local is None or v.local.shape[1:] != wanted.shape for v in mates):
        return {}
    basis = torch.cat([v.local.double() for v in mates]).T  # [samples, passes of all ranks]
    if basis.shape[1] >= basis.shape[0]:  # with so many unknowns anything would fit
        return {}
    found = torch.linalg.lstsq(basis, wanted[:, None], driver="gelsd").solution
    if not case.alike((basis @ found)[:, 0], wanted):
        return {}
    most = found.abs().max().item()
    each = [s if abs(s) > SAME * most else 0.0 for s in found[:, 0].tolist()]
    counts = [len(v.local) for v in mates]
    begins = [sum(counts[:n]) for n in range(len(counts))]
    return {v.rank: each[b : b + n] for v, b, n in zip(mates, begins, counts, strict=True)}


def _passes(case: Case) -> str:
    """Explain a gradient in which one rank's backward passes do not count alike."""
    by_rank = shares(case)
    if all(same(s, each[0]) for each in by_rank.values() for s in each):
        return ""
    said = "; ".join(
        f"rank {rank} {', '.join(f'{s:.3g}' for s in each[:8])}{', …' if len(each) > 8 else ''}"
        for rank, each in by_rank.items()
    )
    kept = {f"{s:.2g}" for each in by_rank.values() for s in each if s}
    lost = len(kept) == 1 and all(each[-1] and not each[0] for each in by_rank.values())
    why = "what came before is lost (zeroed? overwritten?)" if lost else (
        "divided, averaged, lost between them?"
    )  # fmt: skip
    return f"counts what each backward gave {said} times, where all should count alike: {why}"


def _mixed(case: Case) -> str:
    """Explain a gradient that is a sum of the ranks' own gradients, but not their mean."""
    by_rank = {rank: each[0] for rank, each in shares(case).items()}
    used = [rank for rank, share in by_rank.items() if share]
    if len(by_rank) < 2:
        return ""
    if len(used) == 1:
        return f"is rank {used[0]}'s own gradient: the other ranks' are not in it"
    if all_same(by_rank.values()):
        return ""
    each = ", ".join(f"{s:.3g}" for s in by_rank.values())
    return (
        f"is the sum of {each} times the ranks' own gradients, where all should count alike: "
        "each was clipped, or divided, before they were averaged"
    )


# Wide formats: an integer type of the same size, and the low bits that narrower formats leave zero.
SPARE = {
    torch.float32: (torch.int32, {"bfloat16": 16, "float16": 13}),
    torch.float64: (torch.int64, {"float32": 29, "bfloat16": 45, "float16": 42}),
}


def _rounded(case: Case) -> str:
    """Explain a value with the digits of a narrower format, or of a sum of a few such numbers."""
    first, dtype = case.wrong[0], case.near.whole.dtype
    if dtype not in SPARE or not 3 * case.near.of_all < case.error < 0.1:
        return ""
    whole, narrow = SPARE[dtype]

    def short(x: Tensor, zeros: int) -> float:
        return ((x.to(dtype).view(whole) & (2**zeros - 1)) == 0).double().mean().item()

    for name, zeros in narrow.items():
        for sums in (0, 9):  # a sum of two numbers mostly uses up to 9 bits more
            spare = max(1, zeros - sums)
            found = max(short(first.found * n, spare) for n in (1, len(case.ranks)))
            if found > 0.9 and short(first.wanted, spare) < 0.5:
                return f"has the digits of {name}: it was added up, sent or kept in {name}"
    return ""


def _bias(case: Case) -> str:
    """Explain an output whose rows are all off by the same amount, such as a bias."""
    value = case.wrong[0]
    if value.found.dim() < 2 or case.key.phase != "forward":
        return ""
    rest = (value.found - value.wanted).reshape(-1, value.found.shape[-1])
    mean = rest.mean(0)
    if gap(rest, mean.expand_as(rest), rms(rest))[0] > 0.05:
        return ""
    prefix = case.key.name.partition("[")[0]
    for key, parts in case.plain.parts.items():
        bias = parts[0].value.double()
        if key.phase != "weights" or key.name.rpartition(".")[0] != prefix:
            continue
        c = ratio(mean, bias) if bias.dim() == 1 and bias.shape == mean.shape else 0.0
        if c and gap(mean, c * bias, rms(bias))[0] < 0.05:
            return f"{key.name} is in it {1 + c:.3g} times"
    return "every row is off by the same amount"


def _rows(case: Case) -> str:
    value = case.wrong[0]
    if value.found.dim() < 2:
        return ""
    rows = (value.found - value.wanted).reshape(-1, value.found.shape[-1])
    off = rows.square().mean(-1).sqrt() > case.near.of_row * max(case.near.size, 1e-300)
    said = f"{int(off.sum())} of {len(off)} rows are wrong ({spans(off.nonzero().flatten())})"
    elsewhere = by_rows(value.found, case.near.whole)
    if elsewhere is not None and case.alike(value.found, elsewhere.of(case.near.whole).double()):
        return f"{said}; they are right rows of the whole that belong elsewhere"
    return said if 0 < off.sum() < len(off) else ""


def _of_before(case: Case) -> str:
    old = case.whole(step=case.key.step - 1) if case.key.step > 0 else None
    if old is None or old.shape != case.near.whole.shape:
        return ""
    value = case.wrong[0]
    old = value.place.of(old).double().view(value.found.shape)
    if case.alike(value.found, old):
        return "is that of the step before"
    both = case.alike(value.found, value.wanted + old)
    return "is the right one and that of the step before (zero_grad?)" if both else ""


def _decay(case: Case) -> str:
    """Explain an update that is off by a multiple of the weight: weight decay."""
    weight = case.whole(step=BEFORE, phase="weights")
    if case.key.phase != "update" or case.key.step or weight is None:
        return ""
    value = case.wrong[0]
    rest, weight = (
        value.found - value.wanted,
        value.place.of(weight).double().view(value.found.shape),
    )
    c = ratio(rest, weight)
    if not c or gap(rest, c * weight, rms(c * weight))[0] > 0.05:
        return ""
    much = "much" if c > 0 else "little"
    return f"{abs(c):.3g} times the weight is too {much} in it: weight decay"


def _another(case: Case) -> str:
    value = case.wrong[0]
    alike = len(case.values) > 1 and all(case.alike(v.found, value.found) for v in case.values)
    c = ratio(value.found, value.wanted)
    near = f", nearest to {c:.3g} times the right one" if c and not same(c, 1.0) else ""
    return f"{ANOTHER}{', the same on all ranks' if alike else ''}{near}"


CAUSES = (
    _nothing, _start, _dice, _rounded, _factor, _passes, _not_summed, _mixed, _bias, _rows,
    _of_before, _decay, _another,
)  # fmt: skip
