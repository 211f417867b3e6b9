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
                with on_time():
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
        with on_time():
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
    with on_time():
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
        with on_time():
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


@pytest.fixture
def busy_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Busy)
    monkeypatch.setattr(torch.cuda, "Stream", Busy)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())


@pytest.mark.usefixtures("busy_gpu")
def test_on_a_gpu_the_clock_starts_when_the_stream_is_so_far():
    def work() -> tuple[float, float, list[float]]:
        slow = link.slow(0.0, BANDWIDTH)  # all-reduce of SIZE: 0.096 s
        x = torch.ones(SIZE).as_subclass(OnGpu)
        dist.barrier()
        begin = time.monotonic()
        Busy.until = begin + BUSY
        handles = [dist.all_reduce(x, group=slow, async_op=True) for _ in range(2)]
        queued = time.monotonic() - begin
        handles[1].wait()
        return (
            queued,
            time.monotonic() - begin,
            [t - begin for entry in slow.log for t in entry[2:]],
        )

    for queued, waited, log in ranks.run(work, 2, device="cpu"):
        with on_time():
            assert queued < 0.1  # the host was not stopped
        assert waited > 0.99 * (BUSY + 2 * 0.096)
        called, begun, over, called_too, begun_too, over_too = log
        with on_time():
            assert called == pytest.approx(BUSY, abs=0.02) == called_too
            assert begun == called and over == pytest.approx(BUSY + 0.096, abs=0.02)
            assert begun_too == over and over_too == pytest.approx(BUSY + 2 * 0.096, abs=0.02)


@pytest.mark.usefixtures("busy_gpu")
@pytest.mark.parametrize("late", [0, 1], ids=["sender", "receiver"])
def test_on_a_gpu_a_message_sets_off_when_both_streams_are_so_far(late: int):
    def work() -> float:
        slow, me = link.slow(0.01, BANDWIDTH), dist.get_rank()
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
        queued = time.monotonic() - begin
        handle.wait()
        seconds = time.monotonic() - begin
        if me == 1:
            dist.send(answer, 0)
            assert queued < 0.1 and x[0].item() == 0
        return seconds

    expected = BUSY + 0.01 + SIZE / BANDWIDTH
    seconds = ranks.run(work, 2, device="cpu")[1]
    with on_time():
        assert 0.97 * expected < seconds < 1.2 * expected + 0.01


@pytest.mark.parametrize(
    ("latency", "bandwidth", "message"),
    [
        (-1.0, 1e9, "latency=-1.0: allowed are numbers from 0"),
        (float("nan"), 1e9, "latency=nan"),
        (0.0, 0.0, "bandwidth=0.0: allowed are numbers above 0"),
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
        mesh = dist.device_mesh.DeviceMesh.from_group(group, ranks.device().type)
        return mesh.get_group() is group

    assert ranks.run(found, 2) == [True, True]


def test_messages_in_both_directions_go_in_a_batch() -> None:
    """torch asks the group for its backend there, from 2.15 on."""

    def work() -> tuple[list[float], float]:
        group = link.slow(0.05, 1e9)
        me = dist.get_rank(group)
        got = torch.zeros(3)
        begin = time.monotonic()
        ranks.exchange(torch.full((3,), me + 1.0), 1 - me, got, 1 - me, group).wait()
        return got.tolist(), time.monotonic() - begin

    (first, seconds), (second, _) = ranks.run(work, 2)
    assert first == [2.0] * 3 and second == [1.0] * 3 and seconds >= 0.05
