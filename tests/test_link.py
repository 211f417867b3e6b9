"""The emulated slow link: right data, late."""

from __future__ import annotations

import contextlib
import statistics
import time

import pytest
import torch
import torch.distributed as dist
from timed import on_time
from torch import nn

from shardlab import ranks
from shardlab.measure import count, link

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
                with on_time():
                    assert 0.97 * predicted < measured < 1.25 * predicted + 0.01, (name, measured)


def messages() -> list[float]:
    """Seconds of four messages on one wire, of a late receive, and of compute beside a sum."""
    peer = 1 - dist.get_rank()
    slow, late = link.slow(0.0, BANDWIDTH), link.slow(0.01, BANDWIDTH)
    x, y, whole = torch.ones(SIZE // 4), torch.empty(SIZE // 4), torch.ones(SIZE)

    def four() -> None:
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

    def overlapped() -> None:
        handle = dist.all_reduce(whole, group=slow, async_op=True)
        time.sleep(0.08)  # the wire needs 0.096 s
        handle.wait()

    return [timed(call) for call in (four, received_late, overlapped)]


def test_messages_queue_set_off_when_both_ends_are_there_and_leave_compute_alone():
    each, expected = SIZE / BANDWIDTH, 0.05 + 0.01 + SIZE / BANDWIDTH
    for rank, (four, late, overlapped) in enumerate(ranks.run(messages, 2)):
        with on_time():
            assert 0.97 * 4 * each < four < 1.25 * 4 * each + 0.01
            assert rank == 0 or 0.97 * expected < late < 1.2 * expected + 0.01
            assert 0.096 * 0.97 < overlapped < 0.14  # one after the other they would take 0.176


def on_a_slow_group() -> dict[str, object]:
    """What libraries do on one: torch's DDP, a mesh, a batch of messages, a second wait."""
    found: dict[str, object] = {}
    torch.manual_seed(0)
    group, me = link.slow(0.05, 1e9), dist.get_rank()
    plain = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 5))
    x = torch.randn(2, 4, 50)
    model = nn.parallel.DistributedDataParallel(plain, process_group=group)
    with count.sent() as sent:
        model(x[me]).sum().backward()
    got = plain[0].weight.grad.clone()
    plain.zero_grad()
    (plain(x.flatten(0, 1)).sum() / 2).backward()
    torch.testing.assert_close(got, plain[0].weight.grad)
    found["sent"] = sent.collectives

    # FSDP2 is given a mesh, and a mesh looks its group up by name.
    mesh = dist.device_mesh.DeviceMesh.from_group(group, ranks.device().type)
    found["mesh"] = mesh.get_group() is group

    # torch asks the group for its backend there, from 2.15 on.
    got, begin = torch.zeros(3), time.monotonic()
    ranks.exchange(torch.full((3,), me + 1.0), 1 - me, got, 1 - me, group).wait()
    found["exchange"] = got.tolist(), time.monotonic() - begin >= 0.05

    # gloo's own handle waits for ever when it is waited for twice; this one asks it once.
    ends = (dist.isend, dist.irecv)
    handle = ends[me](torch.ones(3), 1 - me, group=group)
    handle.wait()
    found["over"] = handle.is_completed()
    return found


def test_libraries_run_on_it_and_are_counted():
    for rank, found in enumerate(ranks.run(on_a_slow_group, 2, timeout=20)):
        assert found == {
            "sent": {"all_reduce": (1, 4 * (50 * 50 + 50 + 50 * 5 + 5))},
            "mesh": True,
            "exchange": ([2.0 - rank] * 3, True),
            "over": True,
        }


# A GPU's stream that is busy until a moment, without a GPU: operations are queued behind its work.

BUSY = 0.3  # seconds


class Busy:
    """A stream, and the event in it: it comes to what is queued when its work is done."""

    until = 0.0

    def __init__(self, *_, enable_timing: bool = False):
        self.at = 0.0

    def record(self, stream: Busy | None = None) -> None:
        self.at = time.monotonic() if stream else max(time.monotonic(), Busy.until)

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.monotonic()))

    def elapsed_time(self, other: Busy) -> float:
        assert max(self.at, other.at) <= time.monotonic()  # as CUDA has it
        return 1e3 * (other.at - self.at)


class OnGpu(torch.Tensor):
    """A tensor of this machine's memory that says that it lies on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)


def on_a_busy_gpu() -> tuple[float, list[float], list[float]]:
    """When two sums were queued; when they began and ended; seconds of messages with a late end."""
    for name, stands in {"Event": Busy, "Stream": Busy}.items():
        setattr(torch.cuda, name, stands)
    torch.cuda.device = lambda _: contextlib.nullcontext()
    slow, me = link.slow(0.0, BANDWIDTH), dist.get_rank()  # all-reduce of SIZE: 0.096 s
    x = torch.ones(SIZE).as_subclass(OnGpu)
    dist.barrier()
    begin = time.monotonic()
    Busy.until = begin + BUSY
    handles = [dist.all_reduce(x, group=slow, async_op=True) for _ in range(2)]
    queued = time.monotonic() - begin
    handles[1].wait()
    assert time.monotonic() - begin > 0.99 * (BUSY + 2 * 0.096)
    log = [t - begin for entry in slow.log for t in entry[2:]]

    slow, seconds = link.slow(0.01, BANDWIDTH), []
    for late in (0, 1):  # the sender, then the receiver
        x = torch.full((SIZE // 4,), float(me)).as_subclass(OnGpu)
        answer = torch.zeros(1)
        dist.barrier()
        begin = time.monotonic()
        Busy.until = begin + BUSY * (me == late)
        if me == 0:
            handle = dist.isend(x, 1, group=slow)
            # The sender's host does something else until the message is there.
            dist.recv(answer, 1)
        else:
            handle = dist.irecv(x, 0, group=slow)
        queued = max(queued, (time.monotonic() - begin) * me)
        handle.wait()
        seconds.append(time.monotonic() - begin)
        if me == 1:
            assert x[0].item() == 0
            dist.send(answer, 0)
    return queued, log, seconds


def test_on_a_gpu_the_clock_starts_when_the_streams_are_so_far():
    expected = BUSY + 0.01 + SIZE / BANDWIDTH
    for rank, (queued, log, seconds) in enumerate(ranks.run(on_a_busy_gpu, 2, device="cpu")):
        called, begun, over, called_too, begun_too, over_too = log
        with on_time():
            assert queued < 0.1  # the host was not stopped
            assert called == pytest.approx(BUSY, abs=0.02) == called_too
            assert begun == called and over == pytest.approx(BUSY + 0.096, abs=0.02)
            assert begun_too == over and over_too == pytest.approx(BUSY + 2 * 0.096, abs=0.02)
            assert rank == 0 or all(0.97 * expected < s < 1.2 * expected + 0.01 for s in seconds)
