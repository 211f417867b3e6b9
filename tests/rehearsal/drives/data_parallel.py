"""Data parallelism: equal gradients, in every way that the lesson shows."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardlab import data_parallel as dp
from shardlab import ranks
from shardlab.gpt.model import loss

from .common import alike, batch, local_batch, losses, near, twice, world


def joined_batch():
    group, rank, size = world()
    if "nccl" in dist.get_backend():
        group = dist.new_group(backend="nccl")  # which takes nothing that lies on the CPU
    total = dp.joined_mean(torch.ones((), device=ranks.device()), rank + 1, group)
    near(total, torch.tensor(size / sum(range(1, size + 1)), device=total.device))


def after_an_interrupted_backward():
    plain, mine = twice()
    mine = dp.DataParallel(mine, world()[0], 2**10, 2**8)
    x, y = map(local_batch, batch())
    last = next(mine.module.parameters())  # whose gradient comes last, or nearly
    handle = last.register_hook(_interrupt)
    try:
        loss(mine(x), y).backward()
    except _Interrupted:
        pass
    else:
        raise AssertionError("nothing interrupted the backward")
    handle.remove()
    losses(plain, mine)
    alike(mine, plain)


class _Interrupted(Exception):
    """An error in backward."""


def _interrupt(_: torch.Tensor) -> None:
    raise _Interrupted


def drift():
    assert dp.drift(twice()[0], world()[0]) == 0.0
