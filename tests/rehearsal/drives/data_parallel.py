"""Data parallelism: equal gradients, in every way that the lesson shows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shardlab import data_parallel as dp
from shardlab import link, ranks
from shardlab.model import loss

from .common import alike, batch, losses, near, on, share, twice, waits, world


def each_parameter_and_buckets():
    for average in (_each, _in_buckets):
        plain, mine = twice()
        losses(plain, mine)
        average(mine)
        alike(mine, plain)


def _each(module: nn.Module) -> None:
    dp.average_gradients(module, world()[0])


def _in_buckets(module: nn.Module) -> None:
    dealt = dp.assign_buckets(module.parameters())
    dp.average_in_buckets([dp.Bucket(parameters, world()[0]) for parameters in dealt])


@on(1, 2, 4)
def wrapped():
    plain, mine = twice()
    mine = dp.DataParallel(mine, world()[0], 2**12, 2**10)
    losses(plain, mine)
    alike(mine, plain)
    x, y = map(share, batch())
    with mine.no_sync():
        loss(mine(x), y).backward()
    torch.optim.AdamW(mine.parameters()).step()


def hot_path():
    _, mine = twice()
    mine = dp.DataParallel(mine, world()[0], 2**12, 2**10)
    x, y = map(share, batch())
    for step in range(2):
        with waits() as found:
            dp.joined_mean(loss(mine(x), y), y.numel(), world()[0]).backward()
        if step:  # the first one makes connections
            assert not found, f"the host waits at {found}"


def torchs():
    plain, mine = twice()
    mine = nn.parallel.DistributedDataParallel(mine)
    losses(plain, mine)
    alike(mine, plain)


def torchs_on_a_slow_link():
    plain, mine = twice()
    mine = nn.parallel.DistributedDataParallel(mine, process_group=link.slow(1e-4, 1e9))
    losses(plain, mine)
    alike(mine, plain)


def joined_batch():
    group, rank, size = world()
    if "nccl" in dist.get_backend():
        group = dist.new_group(backend="nccl")  # which takes nothing that lies on the CPU
    total = dp.joined_mean(torch.ones((), device=ranks.device()), rank + 1, group)
    near(total, torch.tensor(size / sum(range(1, size + 1)), device=total.device))


def after_an_interrupted_backward():
    plain, mine = twice()
    mine = dp.DataParallel(mine, world()[0], 2**10, 2**8)
    x, y = map(share, batch())
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
