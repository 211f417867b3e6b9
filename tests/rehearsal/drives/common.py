"""Parts shared by drives: small models, batches, and comparisons with one process.

A drive is a public function of a topic's file. It runs on every rank, on one pretended GPU (two
ranks share it, gloo) and on two (nccl), and asserts its promises. `@on(1, 2, 4)` runs it on four as
well; `@on_caller` runs it once, in the process that starts ranks.

Each day a drive runs only on the largest of its numbers of GPUs, because most faults on a shared
GPU also occur on two. Exceptions are drives with messages, which go through the host on a shared
GPU, and drives that depend on the GPU's owner: `@on(1, 2, daily=(1, 2))`. --weekly runs all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import ranks
from shardlab.gpt.model import GPT, Config

GPT2 = Config(vocab=32, seq=8, layers=2, heads=4, hidden=32)
Drive = Callable[[], Any]


def on(*gpus: int, daily: tuple[int, ...] = ()) -> Callable[[Drive], Drive]:
    """Set the numbers of GPUs on which a drive runs, and those on which it runs each day."""

    def mark(drive: Drive) -> Drive:
        drive.gpus, drive.daily = gpus, daily or (max(gpus),)
        return drive

    return mark


def on_caller(drive: Drive) -> Drive:
    """Mark a drive that starts ranks itself."""
    drive.on_caller = True
    return drive


def world() -> tuple[dist.ProcessGroup, int, int]:
    """Return the group of all ranks, this rank's number, and the number of ranks."""
    return dist.group.WORLD, dist.get_rank(), dist.get_world_size()


def model(config: Config = GPT2, dtype: torch.dtype = torch.float32) -> GPT:
    """Return the same model on every rank's device."""
    torch.manual_seed(0)
    return GPT(config).to(ranks.device(), dtype)


def batch(config: Config = GPT2, step: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a step, the same on all ranks; [4, seq] each."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(config.vocab, (2, 4, config.seq), generator=generator)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def local_batch(tensor: Tensor) -> Tensor:
    """Return this rank's part of a batch."""
    _, rank, size = world()
    return tensor.chunk(size)[rank]


def near(given: Tensor, wanted: Tensor, tolerance: float = 1e-4) -> None:
    """Compare; 1e-4: float32 sums in another order, through two layers."""
    gap = (given.detach().float() - wanted.detach().float()).abs().max().item()
    assert gap <= tolerance, f"differs by {gap}"


@contextmanager
def folder() -> Iterator[Path]:
    """Return one folder for all ranks."""
    group, rank, _ = world()
    with tempfile.TemporaryDirectory() as own:
        name = [own]
        dist.broadcast_object_list(name, 0)
        yield Path(name[0])
        dist.barrier()
