"""Tests that need a GPU; they are skipped elsewhere, with that reason."""

from __future__ import annotations

import time

import contract
import pytest
import torch
import torch.distributed as dist
from rows import ROWS, select_gpu_rows
from torch import nn

from shardlab import data_parallel, ranks
from shardlab.measure import link
from shardtools import parity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.device_count(), reason="this machine has no CUDA GPU"),
]


def test_ranks_share_one_gpu_or_have_their_own():
    world_size = 2
    own = torch.cuda.device_count() >= world_size
    results = ranks.run(lambda: (dist.get_backend(), str(ranks.device())), world_size)
    if own:
        assert [device for _, device in results] == ["cuda:0", "cuda:1"]
    else:
        assert results == [("gloo", "cuda:0")] * world_size


def test_the_caller_may_have_used_cuda_before():
    torch.ones(1, device="cuda")  # a fork would be broken after this: `run` starts fresh ranks
    assert ranks.run(lambda: torch.ones(2, device=ranks.device()).sum().item(), 2) == [2, 2]


def test_messages_between_ranks_on_gpus():
    def work() -> list[float]:
        me, device = dist.get_rank(), ranks.device()
        got, back = torch.zeros(2, 3, device=device)
        mine = torch.full((3,), float(me), device=device)
        ranks.exchange(mine, 1 - me, got, 1 - me).wait()
        calls = [lambda: ranks.isend(got, 1 - me), lambda: ranks.irecv(back, 1 - me)]
        for message in [call() for call in (calls[::-1] if me else calls)]:
            message.wait()
        assert got.is_cuda and torch.equal(back, mine)
        return got.tolist()

    assert ranks.run(work, 2) == [[1.0] * 3, [0.0] * 3]


def stand_still(gradient: torch.Tensor) -> None:
    time.sleep(1000)


def test_a_hook_that_hangs_is_found():
    """A backward's hooks run in a thread of autograd's own on a GPU."""

    def work() -> None:
        x = torch.ones(3, device=ranks.device(), requires_grad=True)
        if dist.get_rank() == 1:
            x.register_hook(stand_still)
        x.sum().backward()
        dist.all_reduce(x.grad)
        x.grad.sum().item()

    with pytest.raises(ranks.RankError) as caught:
        ranks.run(work, 2, timeout=20)
    assert caught.value.ranks == [1] and "in stand_still" in str(caught.value)
    assert "Rank 0 waits for rank 1 in all_reduce" in str(caught.value)


@pytest.mark.skipif(
    not hasattr(torch._C, "_cuda_sleep"), reason="nothing here keeps a stream busy for a while"
)
def test_the_slow_links_clock_starts_when_the_stream_is_so_far():
    def work() -> tuple[float, float, float]:
        device = ranks.device()
        slow = link.create_slow_group(0.0, 1e9)
        x = torch.ones(1000, device=device)
        dist.all_reduce(x, group=slow)
        torch.cuda.synchronize()
        begin, (before, after) = time.monotonic(), (torch.cuda.Event(True) for _ in range(2))
        before.record()
        torch.cuda._sleep(10**9)  # cycles: half a second or so
        after.record()
        handle = dist.all_reduce(x, group=slow, async_op=True)
        queued = time.monotonic() - begin
        handle.wait()
        torch.cuda.synchronize()
        return queued, slow.log[-1][3] - begin, before.elapsed_time(after) / 1e3

    for queued, begun, busy in ranks.run(work, 2):
        assert queued < 0.5 * busy and 0.9 * busy < begun


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("technique", dict.fromkeys(row.technique for row in ROWS if row.gpus))
def test_what_is_parallel_trains_as_one_process_does(technique: str, size: int):
    rows = select_gpu_rows(technique, size)
    if not rows:
        pytest.skip(f"{technique} has no row of {size} ranks for a GPU")
    found = contract.measure_rows(rows, "cuda")
    for row in rows:
        contract.check_gaps(row, found, "cuda")


def test_programs_on_gpus_are_compared():
    def program(watch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 4)).to(ranks.device())
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        watch(model, optimizer)
        x = torch.randn(4, 8, device=ranks.device(), generator=torch.Generator(ranks.device()))
        n, rank = dist.get_world_size(), dist.get_rank()
        model(x[rank::n]).square().mean().backward()
        data_parallel.average_gradients(model, dist.group.WORLD)
        optimizer.step()

    report = parity.check(program, program, 2, draws=1)
    assert report.is_equal and report.num_compared > 10, report
