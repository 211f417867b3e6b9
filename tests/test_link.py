"""The emulated slow link: right data, late."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlab import count, link, ranks

pytestmark = pytest.mark.alone

LATENCY, BANDWIDTH = 2e-3, 50e6  # slow enough that this machine's own transport does not show
SIZE = 1_200_000  # elements of float32; divides by 2, 3 and 4


def timed(call) -> float:
    """Median seconds of three calls that begin together on all ranks."""
    seconds = []
    for _ in range(3):
        dist.barrier()
        begin = time.monotonic()
        call()
        seconds.append(time.monotonic() - begin)
    return statistics.median(seconds)


def test_operations_are_right_and_take_their_time():
    def work() -> dict[str, tuple[bool, float, float]]:
        rank, ranks_ = dist.get_rank(), dist.get_world_size()
        slow = link.slow(LATENCY, BANDWIDTH)
        x = torch.full((SIZE,), float(rank))
        gathered, part = torch.empty(SIZE * ranks_), torch.empty(SIZE // ranks_)

        def all_reduce() -> bool:
            y = x.clone()
            dist.all_reduce(y, group=slow)
            return y[0] == sum(range(ranks_))

        def all_gather() -> bool:
            dist.all_gather_into_tensor(gathered, x, group=slow)
            return gathered[::SIZE].tolist() == list(range(ranks_))

        def reduce_scatter() -> bool:
            dist.reduce_scatter_tensor(part, x, group=slow)
            return part[0] == sum(range(ranks_))

        def broadcast() -> bool:
            y = x.clone()
            dist.broadcast(y, 1, group=slow)
            return y[-1] == 1

        def message() -> bool:
            y = torch.empty(SIZE)
            out = ranks.isend(x, (rank + 1) % ranks_, slow)
            ranks.irecv(y, (rank - 1) % ranks_, slow).wait()
            out.wait()
            return y[0] == (rank - 1) % ranks_

        def predicted(operation: str, size: int = 4 * SIZE) -> float:
            return link.ring_seconds(operation, size, ranks_, LATENCY, BANDWIDTH)

        results = {}
        for call, seconds in (
            (all_reduce, predicted("all_reduce")),
            (all_gather, predicted("all_gather", 4 * SIZE * ranks_)),
            (reduce_scatter, predicted("reduce_scatter")),
            (broadcast, predicted("broadcast")),
            (message, LATENCY + 4 * SIZE / BANDWIDTH),
        ):
            results[call.__name__] = (bool(call()), timed(call), seconds)
        return results

    for world_size in (2, 3):
        for result in ranks.run(work, world_size):
            for name, (right, measured, predicted) in result.items():
                assert right, name
                # Never early. Late by no more than a quarter: a busy machine wakes sleepers late,
                # and ranks do not begin at quite the same time.
                assert 0.97 * predicted < measured < 1.25 * predicted + 0.01, (name, measured)


def test_messages_queue_on_one_wire():
    def work() -> float:
        slow = link.slow(0.0, BANDWIDTH)
        x, y = torch.ones(SIZE // 4), torch.empty(SIZE // 4)

        def four() -> None:
            peer = 1 - dist.get_rank()
            out = [ranks.isend(x, peer, slow) for _ in range(4)]
            for _ in range(4):
                ranks.irecv(y, peer, slow).wait()
            for message in out:
                message.wait()

        return timed(four)

    for seconds in ranks.run(work, 2):
        assert 0.97 * 4 * SIZE / BANDWIDTH < seconds < 1.25 * 4 * SIZE / BANDWIDTH + 0.01


def test_a_message_sets_off_when_its_receive_is_posted():
    def work() -> float:
        slow = link.slow(0.01, BANDWIDTH)
        x, peer = torch.ones(SIZE // 4), 1 - dist.get_rank()

        def late() -> None:
            if peer:  # rank 0
                ranks.isend(x, peer, slow).wait()
            else:
                time.sleep(0.05)
                ranks.irecv(x, peer, slow).wait()

        return timed(late)

    expected = 0.05 + 0.01 + SIZE / BANDWIDTH
    assert 0.97 * expected < ranks.run(work, 2)[1] < 1.2 * expected + 0.01


def test_a_message_that_was_waited_for_is_over():
    """gloo's own handle waits for ever when it is waited for twice; this one asks it once."""

    def work() -> bool:
        slow = link.slow(1e-3, 1e9)
        if dist.get_rank() == 0:
            handle = dist.isend(torch.ones(3), 1, group=slow)
        else:
            handle = dist.irecv(torch.empty(3), 0, group=slow)
        handle.wait()
        return handle.is_completed()

    assert ranks.run(work, 2, timeout=20) == [True, True]


def test_compute_goes_on_while_the_wire_is_busy():
    def work() -> float:
        slow = link.slow(0.0, BANDWIDTH)
        x = torch.ones(SIZE)

        def overlapped() -> None:
            handle = dist.all_reduce(x, group=slow, async_op=True)
            time.sleep(0.08)  # the wire needs 0.096 s
            handle.wait()

        return timed(overlapped)

    for seconds in ranks.run(work, 2):
        assert 0.096 * 0.97 < seconds < 0.14  # one after the other they would take 0.176


def test_torchs_ddp_runs_on_it_and_is_counted():
    def work() -> tuple[torch.Tensor, torch.Tensor, dict[str, tuple[int, int]]]:
        torch.manual_seed(0)
        slow = link.slow(1e-4, 1e9)
        plain = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 5))
        x = torch.randn(2, 4, 50)
        model = nn.parallel.DistributedDataParallel(plain, process_group=slow)
        with count.sent() as sent:
            model(x[dist.get_rank()]).sum().backward()
        got = plain[0].weight.grad.clone()
        plain.zero_grad()
        (plain(x.flatten(0, 1)).sum() / 2).backward()
        return got, plain[0].weight.grad, sent.collectives

    for got, want, collectives in ranks.run(work, 2):
        torch.testing.assert_close(got, want)
        assert collectives == {"all_reduce": (1, 4 * (50 * 50 + 50 + 50 * 5 + 5))}


def test_a_failure_underneath_is_not_swallowed():
    def work() -> None:
        slow = link.slow(0.0, 1e9)
        if dist.get_rank() == 0:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1), group=slow)

    with pytest.raises(ranks.RankError, match="rank 0 of 2 raised ValueError: boom"):
        ranks.run(work, 2)


@pytest.mark.parametrize(
    ("latency", "bandwidth", "message"),
    [
        (-1.0, 1e9, "latency=-1.0: allowed are seconds, 0 or more"),
        (float("nan"), 1e9, "latency=nan"),
        (0.0, 0.0, "bandwidth=0.0: allowed are bytes per second above 0"),
    ],
)
def test_bad_input(latency: float, bandwidth: float, message: str):
    with pytest.raises(ValueError, match=message):
        link.slow(latency, bandwidth)


def test_an_unknown_operation():
    with pytest.raises(ValueError, match="operation='scan': allowed are all_reduce"):
        link.ring_seconds("scan", 1, 2, 0.0, 1.0)


def test_a_mesh_stands_on_a_slow_group() -> None:
    """FSDP2 is given a mesh, and a mesh looks its group up by name."""

    def found() -> bool:
        group = link.slow(0, 1e9)
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        return mesh.get_group() is group

    assert ranks.run(found, 2, device="cpu") == [True, True]
