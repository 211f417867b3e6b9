"""Lesson `gemm`: equal to torch.matmul, bytes as predicted, seconds, bad input."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from timing import timing_claims

from shardlab import gemm, ranks
from shardlab.gemm import Machine
from shardlab.measure import count, link

HALF_UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
sizes = st.integers(1, 17)
ALWAYS = [(1, 1, 1), (10, 9, 7), (8, 12, 16), (3, 2, 2)]  # M, N, K; 1 and 2: some have nothing


def grids(ranks: int) -> list[tuple[int, int]]:
    return [(p, ranks // p) for p in range(1, ranks + 1) if ranks % p == 0]


def way_by_hand(way: str, a: torch.Tensor, b: torch.Tensor, exact: Any, group: Any, full: bool):
    """Do the steps of a reader: multiply the parts `a` and `b`, then collect if `full`."""
    if way == "inner":
        return gemm.multiply_inner(a, b, group, full)
    if way == "rows":
        c = gemm.multiply_rows(a, b)
        return gemm.gather_rows(c, exact.shape[0], group) if full else c
    c = gemm.multiply_columns(a, b)
    return gemm.gather_columns(c, exact.shape[1], group) if full else c


def compare(M: int, N: int, K: int, dtype: torch.dtype, group: dist.ProcessGroup) -> list[str]:
    """Return this rank's differences from torch.matmul, and from the predicted bytes."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    device = ranks.device()
    generator = torch.Generator().manual_seed(M * N * K)
    a_MK, b_KN = (
        torch.randn(shape, generator=generator).to(device, dtype) for shape in ((M, K), (K, N))
    )
    exact = a_MK.double() @ b_KN.double()
    # Each element is a sum of K products. A sum of K terms in any order, each addition rounded, and
    # the product too, is within K u sum|a||b| of the exact one, and there are at most `size` more
    # roundings where ranks or panels are added up.
    u = HALF_UNIT[dtype]
    allowed = 1.01 * (K + 1 + max(size, K)) * u * (a_MK.double().abs() @ b_KN.double().abs())
    wrong: list[str] = []

    def judge(name: str, c: torch.Tensor, expected: torch.Tensor, limit: torch.Tensor) -> None:
        if c.shape != expected.shape or c.dtype != dtype or not c.is_contiguous():
            wrong.append(f"{name}: {list(c.shape)} {c.dtype} {c.stride()}")
        elif not ((c.double() - expected).abs() <= limit).all():
            wrong.append(f"{name} of {M, N, K} {dtype} on rank {rank} of {size}: {c} {expected}")

    def count_up(name: str, work: Any, cost: gemm.Cost, a: torch.Tensor, b: torch.Tensor) -> Any:
        with count.track_memory(a, b, device=device) as held, count.record_traffic() as sent:
            c = work()
        found = {"sent": sent.collectives, "c": c.nbytes, "a": a.nbytes, "b": b.nbytes}
        if device.type == "cpu":
            found["held"] = held.peak_bytes
        predicted = {
            "sent": cost.collectives, "held": cost.peak_bytes,
            "a": cost.a_bytes, "b": cost.b_bytes, "c": cost.c_bytes,
        }  # fmt: skip
        for what, value in found.items():
            if value != predicted[what]:
                wrong.append(f"{name} of {M, N, K}: {what} {value}, predicted {predicted[what]}")
        return c

    for way in gemm.SCHEMES_1D:
        for full in (True, False):
            a, b = (x.clone() for x in gemm.shard_operands(way, a_MK, b_KN, size, rank))
            cost = gemm.predict_cost(way, M, N, K, size, dtype.itemsize, full, rank)
            work = functools.partial(way_by_hand, way, a, b, exact, group, full)
            c = count_up(f"{way} {full=}", work, cost, a, b)
            part = gemm.shard_slice(N if way == "columns" else M, size, rank)
            own = slice(None) if full else (slice(None), part) if way == "columns" else part
            judge(f"{way} {full=}", c, exact[own], allowed[own])
            same = gemm.multiply_sharded(
                way, a_MK, b_KN, group, full
            )  # from views, with their strides
            judge(f"multiply {way} {full=}", same.contiguous(), exact[own], allowed[own])
            if full:
                first = c.clone()
                dist.broadcast(first, group=group, group_src=0)
                judge(f"bits of {way}", c, first.double(), torch.zeros_like(allowed))
    for shape in grids(size):
        grid = gemm.create_grid(group, *shape)
        for width in (None, 1, 3):
            a, b = (x.clone() for x in grid.take_blocks(a_MK, b_KN))
            cost = gemm.predict_cost(
                "summa", M, N, K, size, dtype.itemsize, False, rank, shape, width
            )
            work = functools.partial(gemm.multiply_summa, a, b, K, grid, width)
            c = count_up(f"summa {shape} {width=}", work, cost, a, b)
            judge(f"summa {shape} {width=}", c, grid.take_block(exact), grid.take_block(allowed))
    return wrong


def all_cases(shapes: list[tuple[int, int, int]]) -> list[str]:
    dtypes = list(HALF_UNIT)
    return [
        problem
        for number, shape in enumerate([*ALWAYS, *shapes])
        for problem in compare(*shape, dtypes[number % len(dtypes)], dist.group.WORLD)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@settings(max_examples=1)  # it starts ranks, and has many shapes
@given(shapes=st.lists(st.tuples(sizes, sizes, sizes), min_size=6, max_size=6))
def test_equals_matmul_and_costs_what_was_predicted(
    size: int, shapes: list[tuple[int, int, int]]
) -> None:
    assert ranks.run(all_cases, size, shapes) == [[]] * size


def test_on_a_group_of_other_ranks() -> None:
    def run() -> list[str]:
        group = dist.new_group([3, 1])  # torch orders a group's ranks as in the world
        if dist.get_rank() not in (1, 3):
            return []
        return compare(5, 6, 7, torch.float64, group)

    assert ranks.run(run, 4) == [[]] * 4


# ------------------------------------------------------------------------------- shares


@given(size=st.integers(0, 1000), number=st.integers(1, 40))
def test_shares_are_as_equal_as_it_goes(size: int, number: int) -> None:
    parts = [gemm.shard_slice(size, number, rank) for rank in range(number)]
    assert [i for part in parts for i in range(size)[part]] == list(range(size))
    lengths = gemm.shard_sizes(size, number)
    assert lengths == [part.stop - part.start for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(
    inner=st.integers(1, 200),
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    width=st.none() | st.integers(1, 50),
)
def test_panels_have_one_owner_each(inner: int, rows: int, columns: int, width: int | None) -> None:
    found = gemm.split_panels(inner, rows, columns, width)
    assert [k for panel in found for k in range(panel.begin, panel.end)] == list(range(inner))
    for panel in found:
        of_a, of_b = (
            gemm.shard_slice(inner, columns, panel.column),
            gemm.shard_slice(inner, rows, panel.row),
        )
        assert max(of_a.start, of_b.start) <= panel.begin < panel.end <= min(of_a.stop, of_b.stop)
        assert width is None or panel.end - panel.begin <= width
    if width is None:  # no more of them than the cuts need
        assert len(found) <= rows + columns - 1


# ------------------------------------------------------------------------------- bytes


def test_predictions_by_hand() -> None:
    # 8 x 6 times 6 x 4 on 4 ranks, one byte an element.
    by_hand = {
        ("rows", False): (2 * 6, 6 * 4, 2 * 4, {}, 0),
        ("rows", True): (2 * 6, 6 * 4, 8 * 4, {"all_gather_into_tensor": (1, 8)}, 3 * 32),
        ("columns", False): (8 * 6, 6 * 1, 8 * 1, {}, 0),
        ("columns", True): (8 * 6, 6 * 1, 8 * 4, {"all_gather_into_tensor": (1, 8)}, 3 * 32),
        ("inner", True): (8 * 2, 2 * 4, 8 * 4, {"all_reduce": (1, 32)}, 6 * 32),
        ("inner", False): (8 * 2, 2 * 4, 2 * 4, {"all_to_all_single": (1, 32)}, 3 * 32),
        # A grid of 2 x 2, with panels of 3: 4 x 3 of A and 3 x 2 of B in each of two steps.
        ("summa", False): (4 * 3, 3 * 2, 4 * 2, {"broadcast": (4, 2 * (12 + 6))}, 8 * 6 + 6 * 4),
    }
    for (way, full), (a, b, c, collectives, wire) in by_hand.items():
        cost = gemm.predict_cost(way, 8, 4, 6, 4, 1, full)
        assert (cost.a_bytes, cost.b_bytes, cost.c_bytes) == (a, b, c), way
        assert (cost.collectives, cost.wire_bytes) == (collectives, wire), way
    assert [gemm.predict_cost("inner", 8, 4, 6, 4, 1, rank=r).flops for r in range(4)] == [
        2 * 8 * 4 * k for k in (2, 2, 1, 1)
    ]


def test_a_budget_is_refused_before_anything_is_allocated() -> None:
    one = gemm.predict_cost("rows", 8192, 8192, 8192, 1)
    assert one.peak_bytes == 3 * 4 * 8192**2
    gemm.check_budget(one.peak_bytes, one.peak_bytes)
    with pytest.raises(gemm.MemoryBudgetError, match="needs 805.3 MB, which is 293.3 MB more"):
        gemm.check_budget(one.peak_bytes, 512 * 10**6, "8192 x 8192 times 8192 x 8192")


# ------------------------------------------------------------------------------- seconds


def test_seconds_by_hand() -> None:
    machine = Machine(flops=1.0, latency=1.0, bandwidth=1.0)  # all costs are one second
    flops = 2 * 8 * 4 * 6
    by_hand = {  # 4 ranks, one byte an element, 32 bytes of C
        ("rows", True): 3 * (1 + 8),
        ("rows", False): 0,
        ("columns", True): 3 * (1 + 8),
        ("inner", True): 6 * (1 + 8),
        ("inner", False): 3 * (1 + 8),
    }
    for (way, full), communicate in by_hand.items():
        found = gemm.predict_seconds(way, 8, 4, 6, 4, machine, 1, full)
        largest = flops / 4 if way != "inner" else 2 * 8 * 4 * 2
        assert (found.compute, found.communicate) == (largest, communicate), way
        assert found.total == largest + communicate
    # Two panels of 3: the first comes after 1 + 12 s, and the second while that is multiplied.
    summa = gemm.predict_seconds("summa", 8, 4, 6, 4, machine, 1, False)
    assert (summa.compute, summa.communicate) == (flops / 4, 1 + 12)
    # A link slower than compute: only the last product is exposed.
    slow = gemm.predict_seconds("summa", 8, 4, 6, 4, Machine(48.0, 1.0, 1.0), 1, False)
    assert slow.total == 2 * (1 + 12) + 1
    for way in gemm.SCHEMES:
        alone = gemm.predict_seconds(way, 8, 4, 6, 1, machine, 1, False)
        assert (alone.compute, alone.communicate) == (flops, 0)


@pytest.mark.alone
def test_seconds_on_the_slow_link() -> None:
    latency, bandwidth, n = 0.02, 20e6, 256

    def run() -> tuple[Machine, dict[Any, float]]:
        group = dist.group.WORLD
        slow = functools.partial(link.create_slow_group, latency, bandwidth)
        wire = slow(group)
        machine = gemm.measure_machine(wire, torch.device("cpu"), repeats=3)
        a_MK, b_KN = torch.randn(n, n), torch.randn(n, n)
        grid = gemm.create_grid(group, 2, 2, slow)
        work = functools.partial(gemm.multiply_summa, *grid.take_blocks(a_MK, b_KN), n, grid)
        found = {("summa", False): gemm.time_on_group(work, group, 3)}
        for way in gemm.SCHEMES_1D:
            work = functools.partial(gemm.multiply_sharded, way, a_MK, b_KN, wire, True)
            found[way, True] = gemm.time_on_group(work, group, 3)
        return machine, found

    results = ranks.run(run, 4, device="cpu")
    assert all(result == results[0] for result in results)  # equal on all ranks
    machine, found = results[0]
    # What gloo adds to the emulated wire on a busy machine: some milliseconds.
    with timing_claims():
        assert latency <= 1.01 * machine.latency < 1.5 * latency
        assert 0.8 < machine.bandwidth / bandwidth < 1.3
    known = Machine(machine.flops, latency, bandwidth)
    for (way, full), seconds in found.items():
        predicted = gemm.predict_seconds(way, n, n, n, 4, known, full=full)
        # Never faster than the wire; above it the room is for a machine with more ranks than
        # cores. The ways differ by more: 2, or all of it.
        assert 0.99 * predicted.communicate <= seconds, (way, full)
        with timing_claims():
            assert seconds < 1.4 * predicted.total + 0.02, (way, full, seconds, predicted)
