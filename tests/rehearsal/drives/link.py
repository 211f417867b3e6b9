"""The emulated slow link."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.measure import link

from .common import near, world


def collectives():
    _, _, size = world()
    slow = link.slow(1e-4, 1e9)
    x = torch.ones(8, device=ranks.device())
    dist.all_reduce(x, group=slow)
    near(x, torch.full_like(x, size), 0.0)
    out = torch.empty(8 * size, device=x.device)
    dist.all_gather_into_tensor(out, x, group=slow)
    near(out, torch.full_like(out, size), 0.0)
