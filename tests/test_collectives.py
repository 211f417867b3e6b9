"""Lesson `collectives`: equal to torch's, bytes as predicted, times, bad input, exercises."""

from __future__ import annotations

import itertools
import math
import re
import time

import pytest
import torch
import torch.distributed as dist
from devices import to_device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardlab import collectives, ranks
from shardlab.collectives import CostModel, count_bytes_sent, split_evenly
from shardlab.measure import count

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # half a unit in the last place
WAYS = list(collectives.ALL_REDUCE)
# Each example starts processes: few examples, each with many shapes in one run.
few = settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))


def compare_to_torch(
    elements: int, dtype: torch.dtype, group: dist.ProcessGroup, root: int
) -> list[str]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    source = dist.get_global_rank(group, root)
    x = torch.randn(elements).to(dtype)
    mine = to_device(x)
    pieces, wrong = split_evenly(x, size), []
    magnitude = x.abs().double()
    dist.all_reduce(magnitude, group=group)
    # N - 1 additions, each rounded, in two orders that may differ: for each element
    # |ours - theirs| <= 2 (N - 1) u sum|x|.
    allowed = 2 * (size - 1) * ROUNDING[dtype] * magnitude
    exact = torch.zeros_like(allowed)

    def check_close(
        name: str, ours: torch.Tensor, theirs: torch.Tensor, limit: torch.Tensor
    ) -> None:
        if not ((ours.cpu().double() - theirs.double()).abs() <= limit).all():
            wrong.append(f"{name} of {elements} {dtype} on rank {rank} of {size}: {ours} {theirs}")

    ours, theirs = mine.clone(), x.clone()
    collectives.broadcast(ours, root, group)
    dist.broadcast(theirs, source, group=group)
    check_close("broadcast", ours, theirs, exact)

    ours, theirs = mine.clone(), x.clone()
    collectives.reduce(ours, root, group)
    dist.reduce(theirs, source, group=group)
    if rank == root:
        check_close("reduce", ours, theirs, allowed)

    total = x.clone()
    dist.all_reduce(total, group=group)
    for way in WAYS:
        ours = mine.clone()
        collectives.all_reduce(ours, group, way)
        check_close(f"all_reduce {way}", ours, total, allowed)
        first = ours.cpu().clone()
        dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
        check_close(f"bits of all_reduce {way}", ours, first, exact)

    parts = split_evenly(mine, size)
    ours, theirs = torch.full_like(parts[rank], 7), torch.empty_like(pieces[rank])
    collectives.reduce_scatter(ours, parts, group)
    dist.reduce_scatter(theirs, pieces, group=group)
    check_close("reduce_scatter", ours, theirs, split_evenly(allowed, size)[rank])

    # gloo's all_gather needs equal sizes: unsharded tensors are gathered, then cut.
    everyones = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(everyones, x, group=group)
    ours = torch.full_like(mine, 7)
    collectives.all_gather(split_evenly(ours, size), parts[rank], group)
    check_close(
        "all_gather",
        ours,
        torch.cat([split_evenly(t, size)[r] for r, t in enumerate(everyones)]),
        exact,
    )

    theirs = torch.full((size * len(pieces[rank]),), 7, dtype=dtype)
    ours = to_device(theirs.clone())
    collectives.all_to_all(split_evenly(ours, size), parts, group)
    lengths = [len(piece) for piece in pieces]
    dist.all_to_all_single(theirs, x, [len(pieces[rank])] * size, lengths, group=group)
    check_close("all_to_all", ours, theirs, torch.zeros(len(theirs), dtype=torch.float64))
    return wrong


def all_cases(shapes: list[int], seed: int) -> list[str]:
    torch.manual_seed(1000 * seed + dist.get_rank())
    group, size = dist.group.WORLD, dist.get_world_size()
    return [
        problem
        for elements in shapes
        for dtype in ROUNDING
        for problem in compare_to_torch(elements, dtype, group, (elements + seed) % size)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@few
@given(shapes=st.lists(st.integers(0, 40), min_size=8, max_size=12), seed=st.integers(0, 99))
def test_equals_torch_for_any_size(size: int, shapes: list[int], seed: int) -> None:
    # 0: empty tensors; 1: pieces of zero elements; most others are not divisible by the ranks.
    found = ranks.run(all_cases, size, [0, 1, *shapes], seed)
    assert found == [[]] * size


def on_groups_of_other_ranks(groups: list[list[int]]) -> list[str]:
    wrong = []
    for members in groups:
        group = dist.new_group(members)
        torch.manual_seed(dist.get_rank())
        if dist.get_rank() in members:
            for elements, root in itertools.product((0, 5, 12), range(len(members))):
                wrong += compare_to_torch(elements, torch.float32, group, root)
    return wrong


def test_equals_torch_on_a_group_of_other_ranks() -> None:
    assert ranks.run(on_groups_of_other_ranks, 4, [[1, 3], [1, 2, 3], [2]]) == [[]] * 4


def time_barriers() -> list[tuple[float, float]]:
    times = []
    for late in range(dist.get_world_size()):
        collectives.barrier(dist.group.WORLD)
        if dist.get_rank() == late:
            time.sleep(0.1)
        arrived = time.monotonic()  # one clock for all processes of a machine
        collectives.barrier(dist.group.WORLD)
        times.append((arrived, time.monotonic()))
    return times


def test_barrier_holds_everybody_until_the_last() -> None:
    for turn in zip(*ranks.run(time_barriers, 5), strict=True):
        last_arrival = max(arrived for arrived, _ in turn)
        assert all(left >= last_arrival for _, left in turn)


def test_no_deadlock_when_every_message_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadlock if a call begins only after the last call is over, one message at a time.

    `ranks.exchange` is an exception: it is one call.
    """

    class Done:
        def wait(self) -> None: ...

    def blocking_send(tensor, peer, group=None):
        dist.send(tensor, dist.get_global_rank(group, peer), group=group)
        return Done()

    def blocking_receive(tensor, peer, group=None):
        dist.recv(tensor, dist.get_global_rank(group, peer), group=group)
        return Done()

    monkeypatch.setattr(ranks, "isend", blocking_send)
    monkeypatch.setattr(ranks, "irecv", blocking_receive)
    for size in (3, 4):  # dist.send does not support tensors on a shared GPU
        assert ranks.run(all_cases, size, [size + 1], 0, device="cpu", timeout=30) == [[]] * size


# ------------------------------------------------------------------------------- bytes


def list_calls(x: torch.Tensor, root: int, group: dist.ProcessGroup) -> dict:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    pieces = split_evenly(x, size)
    result = [piece.clone() for piece in pieces]
    landed = [torch.empty_like(pieces[rank]) for _ in range(size)]
    return {
        "broadcast": lambda: collectives.broadcast(x, root, group),
        "reduce": lambda: collectives.reduce(x, root, group),
        "reduce_scatter": lambda: collectives.reduce_scatter(result[rank], pieces, group),
        "all_gather": lambda: collectives.all_gather(result, pieces[rank], group),
        "all_to_all": lambda: collectives.all_to_all(landed, pieces, group),
        "barrier": lambda: collectives.barrier(group),
        **{
            f"all_reduce {way}": lambda way=way: collectives.all_reduce(x, group, way)
            for way in WAYS
        },
    }


def counted_bytes(cases: list[tuple[int, torch.dtype, int]]) -> list[dict[str, int]]:
    found = []
    for elements, dtype, root in cases:
        functions = list_calls(to_device(torch.ones(elements, dtype=dtype)), root, dist.group.WORLD)
        found.append({})
        for name, call in functions.items():
            with count.record_traffic() as sent:
                call()
            found[-1][name] = sent.bytes
    return found


@pytest.mark.parametrize("size", [1, 3, 4])
def test_bytes_counted_are_the_formula_exactly(size: int) -> None:
    types = torch.float32, torch.bfloat16
    cases = [(n, dtype, n % size) for n in (0, 1, 5, 24, 1003) for dtype in types]
    for rank, found in enumerate(ranks.run(counted_bytes, size, cases)):
        for (elements, dtype, root), counted in zip(cases, found, strict=True):
            for name, sent in counted.items():
                at, each = root if name in ("broadcast", "reduce") else 0, dtype.itemsize
                formula = count_bytes_sent(name, elements * each, each, size, rank, at)
                assert sent == formula, (name, elements, dtype, rank)


# ------------------------------------------------------------------------------- seconds

latencies = st.floats(1e-7, 1e-2)
bandwidths = st.floats(1e6, 1e11)
SIZES = [16 * 4**k for k in range(12)]


def test_fit_weighs_small_and_large_messages_alike() -> None:
    exact = CostModel(1e-5, 1e9)
    wobble = [1.1 if k % 2 else 0.9 for k in range(len(SIZES))]  # 10 % noise on every measurement
    noisy = [exact.predict_seconds("message", n) * w for n, w in zip(SIZES, wobble, strict=True)]
    fitted = CostModel.fit(SIZES, noisy)
    assert math.isclose(fitted.latency, 1e-5, rel_tol=0.1)
    assert math.isclose(fitted.bandwidth, 1e9, rel_tol=0.1)


@given(latency=latencies, bandwidth=bandwidths, size=st.integers(2, 5000))
def test_crossover_is_where_both_take_as_long(latency: float, bandwidth: float, size: int) -> None:
    model = CostModel(latency, bandwidth)
    at = model.find_crossover(size)
    assert at >= 0

    def seconds_saved(nbytes: float) -> float:  # seconds that the ring saves over the tree
        tree, ring = (
            model.predict_seconds(f"all_reduce {way}", nbytes, size) for way in ("tree", "ring")
        )
        return tree - ring

    assert seconds_saved(1.01 * at + 1) > 0
    if at > 0:
        assert seconds_saved(0.99 * at) < 0


def test_predictions_by_hand() -> None:
    model = CostModel(latency=1.0, bandwidth=1.0)  # a second per message, a second per byte
    by_hand = {  # 4 ranks, 8 bytes
        "message": 1 + 8,
        "broadcast": 2 * (1 + 8),
        "reduce": 2 * (1 + 8),
        "reduce_scatter": 3 * (1 + 2),
        "all_gather": 3 * (1 + 2),
        "all_to_all": 3 * (1 + 2),
        "all_reduce naive": 3 * (1 + 8) + 1 + 3 * 8,
        "all_reduce tree": 4 * (1 + 8),
        "all_reduce ring": 6 * (1 + 2),
        "barrier": 2,
    }
    assert {name: model.predict_seconds(name, 8, 4) for name in by_hand} == by_hand
    for name in by_hand:
        if name != "message":
            assert model.predict_seconds(name, 8, 1) == 0, name  # one rank sends nothing


# ------------------------------------------------- bad input


def collect_refusals() -> list[str]:
    group, rank, found = dist.group.WORLD, dist.get_rank(), []
    x = to_device(torch.zeros(4))
    two, pieces = dist.new_group([0, 1]), split_evenly(x, 3)
    calls = {
        "must hold 3 tensors": lambda: collectives.all_gather(pieces[:2], pieces[0], group),
        "[2, 1, 1] elements": lambda: collectives.reduce_scatter(x, pieces, group),
        "3 tensors": lambda: collectives.all_to_all(pieces, pieces[:1] * 2, group),
    }
    if rank == 2:
        calls["group that contains this rank"] = lambda: collectives.barrier(two)
    for words, call in calls.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
        found.append(words)
    return found


def test_calls_that_do_not_fit_together_are_refused_with_a_reason() -> None:
    assert [len(found) for found in ranks.run(collect_refusals, 3)] == [3, 3, 4]
