"""One product on many ranks."""

from __future__ import annotations

import torch

from shardlab import gemm, ranks

from .common import near, on, solution, world


def _factors() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(9, 8, device=ranks.device()), torch.randn(8, 10, device=ranks.device())


def cuts():
    a, b = _factors()
    for way in gemm.CUTS:
        near(gemm.multiply(way, a, b, world()[0]), a @ b)
    gemm.multiply("inner", a, b, world()[0], False)


@on(1, 2, 4)
def summa():
    a, b = _factors()
    group, _, size = world()
    grid = gemm.grid(group, *gemm.near_square(size))
    near(gemm.summa(*grid.cut(a, b), 8, grid, 3), grid.block(a @ b))


def measure():
    gemm.measure(world()[0], side=64, size=2**12, repeats=1)
    gemm.shard_throughput(64, 64, 64, degrees=(1, 2), repeats=1)


@on(1, 2, 4)
def solution_of_the_ring():
    group, rank, size = world()
    a = torch.arange(24.0, device=ranks.device()).view(3, 8) + rank
    b = torch.arange(40.0, device=ranks.device()).view(8, 5)
    my_ring_product = solution("gemm", "ex-gemm-ring")
    near(my_ring_product(a, b.chunk(size)[rank].clone(), group), a @ b, 0.0)
