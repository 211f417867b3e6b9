"""One product on many ranks."""

from __future__ import annotations

import torch

from shardlab import gemm, ranks

from .common import near, on, world


def _factors() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(9, 8, device=ranks.device()), torch.randn(8, 10, device=ranks.device())


@on(1, 2, 4, daily=(2,))
def products():
    a, b = _factors()
    group, _, size = world()
    for way in gemm.CUTS:
        near(gemm.multiply(way, a, b, group), a @ b)
    grid = gemm.grid(group, *gemm.near_square(size))
    near(gemm.summa(*grid.cut(a, b), 8, grid, 3), grid.block(a @ b))
