"""The course's own collectives, from messages."""

from __future__ import annotations

import torch

from shardlab import collectives, ranks

from .common import near, on, world


def _make_input() -> torch.Tensor:
    return torch.arange(12.0, device=ranks.device()) + world()[1]


@on(1, 2, 4, daily=(2,))
def all_reduce():
    group, _, size = world()
    for way in ("ring", "tree", "naive"):
        x = _make_input()
        collectives.all_reduce(x, group, way)
        near(x, torch.arange(12.0, device=x.device) * size + sum(range(size)))


@on(1, 2, 4, daily=(1, 4))
def shards():
    group, rank, size = world()
    whole = torch.arange(12.0, device=ranks.device())
    mine = whole.chunk(size)[rank]
    got = torch.empty_like(mine)
    collectives.reduce_scatter(got, collectives.split_evenly(_make_input(), size), group)
    near(got, mine * size + sum(range(size)))
    outputs = list(torch.empty(size, 12 // size, device=mine.device))
    collectives.all_gather(outputs, mine.clone(), group)
    near(torch.cat(outputs), whole)
    collectives.all_to_all(outputs, collectives.split_evenly(_make_input(), size), group)
    near(torch.stack(outputs), mine + torch.arange(size, device=mine.device)[:, None])
    collectives.barrier(group)
