"""One product on many ranks."""

from __future__ import annotations

import torch

from shardlab import gemm, ranks

from .common import near, on, world


def _make_factors() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(9, 8, device=ranks.device()), torch.randn(8, 10, device=ranks.device())


@on(1, 2, 4, daily=(2,))
def products():
    a, b = _make_factors()
    group, _, size = world()
    for way in gemm.SCHEMES_1D:
        near(gemm.multiply_sharded(way, a, b, group), a @ b)
    grid = gemm.create_grid(group, *gemm.choose_grid_shape(size))
    near(gemm.multiply_summa(*grid.take_blocks(a, b), 8, grid, 3), grid.take_block(a @ b))
