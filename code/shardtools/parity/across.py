"""Checks across ranks: rows on no rank, samples, missing gradients, partial sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .causes import spans
from .noise import Tolerance, ratio, size_of, tolerance
from .places import apart
from .record import Record
from .recording import BEFORE, Key, Part
from .report import listed, of_ranks

NOTHING = 1e-3  # of the largest gradient's size: below it gradients may be mere rounding


def on_no_rank(key: Key, near: Tolerance, ranks: list[Any]) -> str:
    """Describe the rows of an output that no rank holds ("" if none is missing)."""
    whole = near.whole
    if whole.dim() < 2 or key.phase != "forward":
        return ""
    had = _had(key, whole, ranks)
    width = whole.shape[-1]
    rows, matrix = had.view(-1, width).any(-1), whole.reshape(-1, width)
    gone = (~rows).nonzero().flatten()
    if not len(gone) or not rows.any():
        return ""
    far = apart(matrix[gone].double(), matrix[rows].double()).amin(1)
    gone = gone[far > near.of_row * near.size * width**0.5]
    said = f"{len(gone)} of {len(matrix)} rows are on no rank ({spans(gone)}): "
    return said + _who(key, ranks) if len(gone) else ""


def _had(key: Key, whole: Tensor, ranks: list[Any]) -> Tensor:
    """Return a mask of the whole tensor: True for numbers that some rank holds."""
    had = torch.zeros(whole.shape, dtype=torch.bool)
    for matcher in ranks:
        for seen in matcher.seen.get(key, ()):
            if seen.place is not None:
                seen.place.mark(had)
    return had


def numbers_on_no_rank(key: Key, whole: Tensor, ranks: list[Any]) -> str:
    """Describe the numbers of a weight that no rank holds ("" if none is missing)."""
    had = _had(key, whole, ranks)
    if had.all() or torch.isin(whole[~had], whole[had]).all():
        return ""
    said = f"{int((~had).sum())} of {had.numel()} numbers are on no rank: {_who(key, ranks)}"
    return f"{said} (parts that are drawn with one seed, or cut alike?)"


def _who(key: Key, ranks: list[Any]) -> str:
    at = {m.rank: [s.place for s in m.seen.get(key, ()) if s.place] for m in ranks}
    for one, places in at.items():
        twins = [
            rank
            for rank, others in at.items()
            if rank >= one and others and len(others) == len(places)
            if all(a.same(b) for a, b in zip(others, places, strict=True))
        ]
        if len(twins) > 1:
            return f"ranks {listed(twins)} have the same ones"
    return f"nobody {'has' if key.phase == 'weights' else 'computed'} them"


def samples(key: Key, plain: Record, ranks: list[Any]) -> str:
    """Describe what is wrong with a step's samples ("" if all ranks together match).

    Ranks that share their samples have the same ones, which count once.
    """

    def ids(parts: Iterable[Part]) -> Counter[int]:
        return Counter(i for part in parts for i in part.value.tolist())

    wanted = ids(plain.parts[key])
    at = {m.rank: ids(seen.part for seen in m.seen.get(key, ())) for m in ranks}
    distinct = [mine for n, mine in enumerate(at.values()) if mine not in [*at.values()][:n]]
    have = sum(distinct, Counter())
    if wanted in (have, sum(at.values(), Counter())):
        return ""
    alike = [rank for rank, mine in at.items() if mine == distinct[0]]
    same = f" (ranks {listed(alike)} have the same ones)" if len(alike) > 1 else ""
    said = []
    for found, words in (
        ((wanted - have).keys(), f"are on no rank{same}"),
        ((have - wanted).keys() & wanted.keys(), "count too often"),
        (have.keys() - wanted.keys(), "are none of this step's"),
    ):
        if found:
            who = [rank for rank, mine in at.items() if found & mine.keys()]
            where = f" ({of_ranks(who)})" if who else ""
            said.append(f"{spans(torch.tensor(sorted(found)))} {words}{where}")
    for step in {k.step for k in plain.parts if k.phase == "samples"} - {key.step}:
        if not have - ids(plain.parts[key._replace(step=step)]):
            said.append(f"they are step {step + 1}'s")
    return "; ".join(said)


def lacks(key: Key, matcher: Any) -> bool:
    """Return True if a rank holds a weight, but not its gradient or update."""

    def there(key: Key) -> int:
        return sum(1 for seen in matcher.seen.get(key, ()) if seen.part.value.numel())

    return there(key) < there(Key(matcher.begins or BEFORE, "weights", key.name))


def skipped(ranks: list[Any]) -> int:
    """Return the first step that a rank did not end: its modules have more calls in it."""
    good, bad = max(ranks, key=lambda m: m.steps), min(ranks, key=lambda m: m.steps)
    more = (k.step for k, parts in bad.seen.items() if len(parts) > len(good.seen.get(k, parts)))
    return min(more, default=bad.steps)


def complete(key: Key, plain: Record, matcher: Any) -> bool:
    """Return True if a rank has all children and weights of a module."""
    prefix = key.name.partition("[")[0]
    prefix += "." if prefix else ""

    def inside(keys: Iterable[Key]) -> set[str]:
        keys = [k for k in keys if k.phase in ("forward", "weights")]
        below = [(k.phase, k.name[len(prefix) :]) for k in keys if k.name.startswith(prefix)]
        return {n if phase == "weights" else n.split(".")[0] for phase, n in below} - {""}

    return inside(plain.parts) <= inside(matcher.seen)


def gradients_fit(step: int, plain: Record, ranks: list[Any]) -> bool:
    """Return True if all gradients of a step are right; tiny ones may be noise."""

    def fits(key: Key, seen: Any) -> bool:
        near = tolerance(plain, key, seen.part.value.dtype)
        return seen.fits and (near.decides or near.size < NOTHING * most)

    ends = [k for k in plain.parts if k.step == step and k.phase == "gradient"]
    most = max((size_of(plain, k) for k in ends), default=0.0)
    return most > 0 and all(
        not lacks(key, m) and all(fits(key, seen) for seen in m.seen.get(key, ()))
        for key in ends
        for m in ranks
    )


Left = list[tuple[Any, int, Any]]  # parts that fit nowhere: matcher, index, what it saw


def summed(key: Key, near: Tolerance, ranks: list[Any], left: Left) -> str:
    """Name the groups of ranks whose parts add up to the whole ("" if there are none).

    Partial sums are no mistake in themselves. Equal parts are no partial sums, even if
    N halves make a whole: they were all-reduced and divided already.
    """
    for groups in groupings(len(ranks)):
        mine = [[one for one in left if one[0].rank in group] for group in groups]
        if all(_adds_up(key, near, each) for each in mine if each):
            return " | ".join(listed(group) for group in groups)
    return ""


def _adds_up(key: Key, near: Tolerance, left: Left) -> bool:
    """Return True if outputs add up in each call, or their gradients over all."""
    values = [seen.part.value for _, _, seen in left]
    alike = (v.shape == values[0].shape and near.off(v, values[0]) <= 1 for v in values[1:])
    if len(values) > 1 and all(alike):
        return False
    if key.phase == "backward":
        return _gradients_add_up(key, near, left)
    calls = {seen.part.call for _, _, seen in left}
    return all(_call_adds_up(key, [one for one in left if one[2].part.call == c]) for c in calls)


def _call_adds_up(key: Key, left: Left) -> bool:
    first = left[0][2].part
    values = [seen.part.value for _, _, seen in left]
    if len(left) < 2 or len({value.shape for value in values}) > 1:
        return False
    total = sum(value.double() for value in values).to(first.value.dtype)
    place, _ = left[0][0].place(key, replace(first, value=total), 0)
    for matcher, _, seen in left if place is not None else ():
        seen.place = matcher.calls[key.step, first.call].stood[key.name] = place
    return place is not None


def _gradients_add_up(key: Key, near: Tolerance, left: Left) -> bool:
    """Return True if parts add up where outputs stood, with equal calls as one."""
    size, forward = near.whole.numel(), key._replace(phase="forward")
    numbers = torch.arange(1, size + 1).view(near.whole.shape)  # 0 is padding
    total, had = torch.zeros(2, size + 1, dtype=torch.float64)
    known = False
    for matcher, _, seen in left:
        factor = matcher.calls[key.step, seen.part.call].factor
        stood, known = matcher.stood(key, seen.part.call), known or factor is not None
        if stood is None or not stood.holds(seen.part.value):
            return False
        at = stood.of(numbers).flatten()
        total.index_add_(0, at, seen.part.value.double().flatten() / (factor or 1.0))
        had[at] = 1.0
    calls = [part.value for part in left[0][0].plain.ordered(forward)]
    n = len(calls) if all(torch.equal(call, calls[0]) for call in calls[1:]) else 1
    found, wanted, had = (
        x.reshape(n, -1).sum(0) for x in (total[1:], near.whole.double(), had[1:])
    )
    found, wanted = found[had > 0], wanted[had > 0]
    factor = 1.0 if known else ratio(found, wanted)
    near = replace(near, size=near.size * n**0.5)  # n calls, each with its own rounding
    return factor != 0.0 and near.off(found, wanted, factor) <= 1


def groupings(ranks: int) -> Iterator[list[list[int]]]:
    """Yield groups of equal size: all, neighbours, strided ranks, each rank alone."""
    yield [list(range(ranks))]
    for size in (s for s in range(2, ranks) if ranks % s == 0):
        step = ranks // size
        yield [list(range(i, i + size)) for i in range(0, ranks, size)]
        yield [list(range(i, ranks, step)) for i in range(step)]
    yield [[i] for i in range(ranks)]
