"""The emulated slow link."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.measure import link

from .common import near, on, world


def collectives():
    _, _, size = world()
    slow = link.slow(1e-4, 1e9)
    x = torch.ones(8, device=ranks.device())
    dist.all_reduce(x, group=slow)
    near(x, torch.full_like(x, size), 0.0)
    out = torch.empty(8 * size, device=x.device)
    dist.all_gather_into_tensor(out, x, group=slow)
    near(out, torch.full_like(out, size), 0.0)


@on(2, 4)
def messages():
    """Their notes go another way than they do."""
    _, rank, size = world()
    slow = link.slow(1e-4, 1e9)
    x = torch.ones(8, device=ranks.device())
    for step in range(1, 3):
        if rank == 0:
            dist.isend(x * step, size - 1, group=slow).wait()
        elif rank == size - 1:
            dist.irecv(x, 0, group=slow).wait()
            near(x, torch.full_like(x, step), 0.0)


@on(1, 2, 4, daily=(1, 4))
def exchange():
    _, rank, size = world()
    slow = link.slow(1e-4, 1e9)
    x = torch.full((8,), float(rank), device=ranks.device())
    got = torch.empty_like(x)
    ranks.exchange(x, (rank + 1) % size, got, (rank - 1) % size, slow).wait()
    near(got, torch.full_like(got, (rank - 1) % size), 0.0)
