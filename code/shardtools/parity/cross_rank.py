"""Checks across ranks: rows that no rank holds, samples, missing gradients, partial sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .causes import format_spans
from .hooks import INITIAL_STEP, Key, Part
from .noise import Tolerance, fit_factor, get_rms, get_tolerance
from .places import compute_row_distances
from .record import Record
from .report import format_ranks, join_ranks

# Share of the largest gradient's size below which a gradient may be mere rounding.
NEGLIGIBLE_GRADIENT = 1e-3
Misfits = list[tuple[Any, int, Any]]  # parts that fit nowhere: matcher, index, match


def describe_missing_rows(key: Key, tol: Tolerance, ranks: list[Any]) -> str:
    """Describe the rows of an output that no rank holds ("" if none is missing)."""
    full = tol.full
    if full.dim() < 2 or key.phase != "forward":
        return ""
    mask = _build_coverage_mask(key, full, ranks)
    width = full.shape[-1]
    rows, matrix = mask.view(-1, width).any(-1), full.reshape(-1, width)
    missing = (~rows).nonzero().flatten()
    if not len(missing) or not rows.any():
        return ""
    distances = compute_row_distances(matrix[missing].double(), matrix[rows].double()).amin(1)
    missing = missing[distances > tol.worst_row * tol.size * width**0.5]
    if not len(missing):
        return ""
    count = f"{len(missing)} of {len(matrix)} rows are held by no rank"
    return f"{count} ({format_spans(missing)}){_explain_missing(key, ranks)}"


def _build_coverage_mask(key: Key, full: Tensor, ranks: list[Any]) -> Tensor:
    mask = torch.zeros(full.shape, dtype=torch.bool)
    for matcher in ranks:
        for match in matcher.matches.get(key, ()):
            if match.place is not None:
                match.place.mark_in(mask)
    return mask


def describe_missing_numbers(key: Key, full: Tensor, ranks: list[Any]) -> str:
    """Describe the elements of a weight that no rank holds ("" if none is missing)."""
    mask = _build_coverage_mask(key, full, ranks)
    if mask.all() or torch.isin(full[~mask], full[mask]).all():
        return ""
    count = f"{int((~mask).sum())} of {mask.numel()} elements are held by no rank"
    why = "were all ranks initialized with the same seed, or given the same shard?"
    return f"{count}{_explain_missing(key, ranks)} ({why})"


def _explain_missing(key: Key, ranks: list[Any]) -> str:
    by_rank = {m.rank: [s.place for s in m.matches.get(key, ()) if s.place] for m in ranks}
    for first, places in by_rank.items():
        twins = [
            rank
            for rank, others in by_rank.items()
            if rank >= first and others and len(others) == len(places)
            if all(a.is_same(b) for a, b in zip(others, places, strict=True))
        ]
        if len(twins) > 1:
            return f": ranks {join_ranks(twins)} hold the same part"
    return "" if key.phase == "weights" else ": no rank computed them"


def check_samples(key: Key, plain: Record, ranks: list[Any]) -> str:
    """Describe what is wrong with a step's samples ("" if all ranks together match).

    Ranks that share their samples have the same ones, which count once.
    """

    def count_ids(parts: Iterable[Part]) -> Counter[int]:
        return Counter(i for part in parts for i in part.value.tolist())

    wanted = count_ids(plain.parts[key])
    by_rank = {m.rank: count_ids(match.part for match in m.matches.get(key, ())) for m in ranks}
    counts = [*by_rank.values()]
    distinct = [mine for n, mine in enumerate(counts) if mine not in counts[:n]]
    found = sum(distinct, Counter())
    if wanted in (found, sum(counts, Counter())):
        return ""
    twins = [rank for rank, mine in by_rank.items() if mine == distinct[0]]
    same = f" (ranks {join_ranks(twins)} have the same samples)" if len(twins) > 1 else ""
    reasons = []
    for ids, reason in (
        ((wanted - found).keys(), f"are held by no rank{same}"),
        ((found - wanted).keys() & wanted.keys(), "are counted too often"),
        (found.keys() - wanted.keys(), "do not belong to this step"),
    ):
        if ids:
            bad = [rank for rank, mine in by_rank.items() if ids & mine.keys()]
            where = f" ({format_ranks(bad)})" if bad else ""
            reasons.append(f"{format_spans(torch.tensor(sorted(ids)))} {reason}{where}")
    for step in {k.step for k in plain.parts if k.phase == "samples"} - {key.step}:
        if not found - count_ids(plain.parts[key._replace(step=step)]):
            reasons.append(f"the ranks' samples belong to step {step + 1}")
    return "; ".join(reasons)


def is_missing(key: Key, matcher: Any) -> bool:
    """Return True if a rank holds a weight, but not its gradient or update."""

    def count_parts(key: Key) -> int:
        return sum(1 for match in matcher.matches.get(key, ()) if match.part.value.numel())

    weight = Key(matcher.first_step or INITIAL_STEP, "weights", key.name)
    return count_parts(key) < count_parts(weight)


def find_skipped_step(ranks: list[Any]) -> int:
    """Return the first step that a rank did not end: its modules have more calls in it."""
    good, bad = max(ranks, key=lambda m: m.steps), min(ranks, key=lambda m: m.steps)
    extra = (k.step for k, x in bad.matches.items() if len(x) > len(good.matches.get(k, x)))
    return min(extra, default=bad.steps)


def has_all_children(key: Key, plain: Record, matcher: Any) -> bool:
    """Return True if a rank has all children and weights of a module."""
    prefix = key.name.partition("[")[0]
    prefix += "." if prefix else ""

    def list_children(keys: Iterable[Key]) -> set[str]:
        keys = [k for k in keys if k.phase in ("forward", "weights")]
        below = [(k.phase, k.name[len(prefix) :]) for k in keys if k.name.startswith(prefix)]
        return {n if phase == "weights" else n.split(".")[0] for phase, n in below} - {""}

    return list_children(plain.parts) <= list_children(matcher.matches)


def has_right_gradients(step: int, plain: Record, ranks: list[Any]) -> bool:
    """Return True if all gradients of a step are right; tiny ones may be noise."""

    def is_right(key: Key, match: Any) -> bool:
        tol = get_tolerance(plain, key, match.part.value.dtype)
        return match.is_found and (tol.is_comparable or tol.size < NEGLIGIBLE_GRADIENT * largest)

    gradients = [k for k in plain.parts if k.step == step and k.phase == "gradient"]
    largest = max((get_rms(plain, k) for k in gradients), default=0.0)
    return largest > 0 and all(
        not is_missing(key, m) and all(is_right(key, match) for match in m.matches.get(key, ()))
        for key in gradients
        for m in ranks
    )


def find_partial_sum_groups(
    key: Key, tol: Tolerance, ranks: list[Any], misfits: Misfits
) -> str:  # fmt: skip
    """Name the groups of ranks whose parts add up to the full tensor ("" if none do).

    Partial sums are no mistake in themselves. Equal parts are no partial sums, even if
    N halves make a full tensor: they were all-reduced and divided already.
    """
    for groups in propose_rank_groups(len(ranks)):
        by_group = [[m for m in misfits if m[0].rank in group] for group in groups]
        if all(_has_right_sum(key, tol, each) for each in by_group if each):
            return " | ".join(join_ranks(group) for group in groups)
    return ""


def _has_right_sum(key: Key, tol: Tolerance, misfits: Misfits) -> bool:
    """Return True if outputs add up in each call, or their gradients over all."""
    first, *others = [match.part.value for _, _, match in misfits]
    same = (v.shape == first.shape and tol.measure_error(v, first) <= 1 for v in others)
    if others and all(same):
        return False
    if key.phase == "backward":
        return _has_right_gradient_sum(key, tol, misfits)
    calls = {match.part.call for _, _, match in misfits}
    by_call = ([m for m in misfits if m[2].part.call == call] for call in calls)
    return all(_has_right_call_sum(key, each) for each in by_call)


def _has_right_call_sum(key: Key, misfits: Misfits) -> bool:
    first = misfits[0][2].part
    values = [match.part.value for _, _, match in misfits]
    if len(misfits) < 2 or len({value.shape for value in values}) > 1:
        return False
    total = sum(value.double() for value in values).to(first.value.dtype)
    place, _ = misfits[0][0].find_place(key, replace(first, value=total), 0)
    for matcher, _, match in misfits if place is not None else ():
        match.place = matcher.get_call(key, first).output_places[key.name] = place
    return place is not None


def _has_right_gradient_sum(key: Key, tol: Tolerance, misfits: Misfits) -> bool:
    """Return True if parts add up at the outputs' places, with equal calls as one."""
    size, forward = tol.full.numel(), key._replace(phase="forward")
    numbers = torch.arange(1, size + 1).view(tol.full.shape)  # 0 is padding
    total, mask = torch.zeros(2, size + 1, dtype=torch.float64)
    is_known = False
    for matcher, _, match in misfits:
        call, value = matcher.get_call(key, match.part), match.part.value
        place = call.output_places.get(key.name)
        is_known = is_known or call.factor is not None
        if place is None or not place.fits_size(value):
            return False
        index = place.take_from(numbers).flatten()
        total.index_add_(0, index, value.double().flatten() / (call.factor or 1.0))
        mask[index] = 1.0
    calls = [part.value for part in misfits[0][0].plain.parts_in_order(forward)]
    n = len(calls) if all(torch.equal(call, calls[0]) for call in calls[1:]) else 1
    sums = total[1:], tol.full.double(), mask[1:]
    found, wanted, mask = (x.reshape(n, -1).sum(0) for x in sums)
    found, wanted = found[mask > 0], wanted[mask > 0]
    factor = 1.0 if is_known else fit_factor(found, wanted)
    tol = replace(tol, size=tol.size * n**0.5)  # n calls, each with its own rounding
    return factor != 0.0 and tol.measure_error(found, wanted, factor) <= 1


def propose_rank_groups(ranks: int) -> Iterator[list[list[int]]]:
    """Yield groups of equal size: all, neighbours, strided ranks, each rank alone."""
    yield [list(range(ranks))]
    for size in (s for s in range(2, ranks) if ranks % s == 0):
        step = ranks // size
        yield [list(range(i, i + size)) for i in range(0, ranks, size)]
        yield [list(range(i, ranks, step)) for i in range(step)]
    yield [[i] for i in range(ranks)]
