"""Attention over a sequence that lies on many ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardlab import context_parallel as cp
from shardlab import ranks
from shardlab.context_parallel.kernel import block_attention

from .common import near, on, world


def _attention(way: str, layout: str, dtype: torch.dtype, tolerance: float) -> None:
    group, rank, size = world()
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 16, 8).to(ranks.device(), dtype) for h in (8, 4, 4))
    mine = [cp.split(t, size, rank, layout, dim=2).clone().requires_grad_() for t in (q, k, v)]
    if way == "ring":
        y = cp.ring_attention(*mine, group, True, layout)
        cp.ring_attention(*mine, group, True, layout, trace=[])
    else:
        y = cp.all_to_all_attention(*mine, group, True, layout)
    y.float().sum().backward()
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    near(y, cp.split(wanted, size, rank, layout, dim=2), tolerance)


@on(1, 2, 4, daily=(2,))
def attention():
    for way, layout in (("ring", "zigzag"), ("ulysses", "contiguous")):
        _attention(way, layout, torch.float32, 1e-5)
        _attention(way, layout, torch.float64, 1e-5)
        _attention(way, layout, torch.bfloat16, 5e-2)


def block():
    q = torch.randn(1, 2, 6, 5, dtype=torch.float64, device=ranks.device())
    block_attention(q, q, q, causal=True)
