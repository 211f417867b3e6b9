"""Counters of bytes sent: by the called operations, and by the network interface."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from timing import timing_claims
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardlab import ranks
from shardlab.measure import count


def test_every_operation_is_counted():
    def work() -> count.Traffic:
        peer = 1 - dist.get_rank()
        with count.record_traffic() as sent:
            out = ranks.isend(torch.ones(5), peer)
            ranks.irecv(torch.empty(5), peer).wait()
            out.wait()
            dist.all_reduce(torch.ones(10))
            dist.broadcast(torch.ones(3, dtype=torch.bfloat16), 0)
            dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
            dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
            dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
            dist.all_to_all_single(torch.empty(6), torch.ones(6))
        dist.all_reduce(torch.ones(99))  # outside: not counted
        return sent

    for sent in ranks.run(work, 2):
        assert (sent.bytes, sent.messages) == (20, 1)
        assert sent.collectives == {
            "all_gather": (1, 8),
            "all_gather_into_tensor": (1, 16),
            "all_reduce": (1, 40),
            "all_to_all_single": (1, 24),
            "broadcast": (1, 6),
            "reduce_scatter_tensor": (1, 32),
        }


def test_what_each_group_sends_is_told_apart():
    def work() -> tuple[float, ...]:
        rank, size = dist.get_rank(), dist.get_world_size()
        even = [rank for rank in range(size) if rank % 2 == 0]
        odd = [rank for rank in range(size) if rank % 2]
        groups = dist.new_group(even), dist.new_group(odd)
        with count.record_traffic() as sent:
            dist.all_reduce(torch.ones(8), group=groups[rank % 2])
            dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=groups[rank % 2])
            dist.all_to_all_single(torch.empty(6), torch.ones(6), group=groups[rank % 2])
            dist.all_reduce(torch.ones(12))
        both = sent.get_group_traffic(groups[rank % 2]), sent.get_group_traffic(dist.group.WORLD)
        return both[0].count_ring_bytes(2), both[1].count_ring_bytes(4)

    # Two ranks: all of 32 bytes, the share of 16, half of 24. Four: 3/2 of 48.
    assert ranks.run(work, 4) == [(32 + 16 + 12, 72.0)] * 4


def test_ddps_own_reducer_is_seen():
    def work() -> tuple[int, int]:
        model = nn.parallel.DistributedDataParallel(nn.Linear(100, 10))
        with count.record_traffic() as sent:
            model(torch.ones(2, 100)).sum().backward()
        return sent.collectives["all_reduce"]

    assert ranks.run(work, 2) == [(1, 4 * 1010)] * 2


def test_functional_collectives_and_dtensors_are_seen():
    def work() -> tuple[dict, dict]:
        group = dist.group.WORLD
        x = torch.ones(4, requires_grad=True)
        with count.record_traffic() as sent:
            functional.all_reduce(x.detach(), "sum", group)
            parts = functional.all_to_all_single_autograd(x, [2, 2], [2, 2], group)
            parts.sum().backward()
        with count.record_traffic() as of_dtensor:
            mesh = DeviceMesh.from_group(group, "cpu")
            summand = DTensor.from_local(torch.ones(6), mesh, [Partial()], run_check=False)
            (summand.redistribute(placements=[Replicate()]) + 1).to_local()
        assert sent.get_group_traffic(group).collectives == sent.collectives
        return sent.collectives, of_dtensor.collectives

    for functions, of_dtensor in ranks.run(work, 2, device="cpu"):
        assert functions == {"all_reduce": (1, 16), "all_to_all_single": (2, 32)}
        assert of_dtensor == {"all_reduce": (1, 24)}


@pytest.mark.alone
def test_the_interface_agrees_with_the_formula():
    if count.read_loopback_bytes() is None:
        pytest.skip("this system does not count an interface's bytes")

    def work() -> None:
        for _ in range(8):
            dist.all_reduce(torch.ones(1 << 20))

    def count_transmitted(fn) -> int:
        # Other programs on this machine can only add: take the least of three.
        readings = []
        for _ in range(3):
            before = count.read_loopback_bytes()
            ranks.run(fn, 2)
            readings.append(count.read_loopback_bytes() - before)
        return min(readings)

    per_rank = (count_transmitted(work) - count_transmitted(dist.barrier)) / 2
    # 2 (N-1)/N of 4 MiB, eight times. 3 %: headers are 0.2 %, the rest is other programs' traffic.
    with timing_claims():
        assert per_rank == pytest.approx(8 * 4 * 2**20, rel=0.03)
