"""The emulated slow link: right data, with the right delay."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from timing import timing_claims

from shardlab import ranks
from shardlab.measure import link

pytestmark = pytest.mark.alone

LATENCY, BANDWIDTH = 2e-3, 50e6  # slow enough to hide this machine's own transport
SIZE = 1_200_000  # elements of float32; divisible by 2, 3 and 4


def time_call(call) -> float:
    """Return the median seconds of three calls that begin together on all ranks."""
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
        slow = link.create_slow_group(LATENCY, BANDWIDTH)
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

        def send_message() -> bool:
            y = torch.empty(SIZE)
            out = ranks.isend(x, (rank + 1) % ranks_, slow)
            ranks.irecv(y, (rank - 1) % ranks_, slow).wait()
            out.wait()
            return y[0] == (rank - 1) % ranks_

        def predict_seconds(operation: str, size: int = 4 * SIZE) -> float:
            return link.estimate_ring_seconds(operation, size, ranks_, LATENCY, BANDWIDTH)

        results = {}
        for call, seconds in (
            (all_reduce, predict_seconds("all_reduce")),
            (all_gather, predict_seconds("all_gather", 4 * SIZE * ranks_)),
            (reduce_scatter, predict_seconds("reduce_scatter")),
            (broadcast, predict_seconds("broadcast")),
            (send_message, LATENCY + 4 * SIZE / BANDWIDTH),
        ):
            results[call.__name__] = (bool(call()), time_call(call), seconds)
        return results

    for world_size in (2, 3):
        for result in ranks.run(work, world_size):
            for name, (right, measured, predicted) in result.items():
                assert right, name
                # Never early. At most a quarter late: a busy machine wakes sleepers late,
                # and ranks do not begin at quite the same time.
                with timing_claims():
                    assert 0.97 * predicted < measured < 1.25 * predicted + 0.01, (name, measured)


def messages() -> list[float]:
    """Return the seconds of four messages, of a late receive, of compute beside a sum."""
    peer = 1 - dist.get_rank()
    slow, late = link.create_slow_group(0.0, BANDWIDTH), link.create_slow_group(0.01, BANDWIDTH)
    x, y, whole = torch.ones(SIZE // 4), torch.empty(SIZE // 4), torch.ones(SIZE)

    def exchange_four() -> None:
        out = [ranks.isend(x, peer, slow) for _ in range(4)]
        for _ in range(4):
            ranks.irecv(y, peer, slow).wait()
        for message in out:
            message.wait()

    def received_late() -> None:
        if peer:  # rank 0
            ranks.isend(x, peer, late).wait()
        else:
            time.sleep(0.05)
            ranks.irecv(x, peer, late).wait()

    def measure_overlap() -> None:
        handle = dist.all_reduce(whole, group=slow, async_op=True)
        time.sleep(0.08)  # the message needs 0.096 s
        handle.wait()

    return [time_call(call) for call in (exchange_four, received_late, measure_overlap)]


def test_messages_queue_set_off_when_both_ends_are_there_and_leave_compute_alone():
    each, expected = SIZE / BANDWIDTH, 0.05 + 0.01 + SIZE / BANDWIDTH
    for rank, (four, late, overlapped) in enumerate(ranks.run(messages, 2)):
        with timing_claims():
            assert 0.97 * 4 * each < four < 1.25 * 4 * each + 0.01
            assert rank == 0 or 0.97 * expected < late < 1.2 * expected + 0.01
            assert 0.096 * 0.97 < overlapped < 0.14  # in sequence they would take 0.176
