"""Dropout of tensors that differ between ranks: each rank draws from a seed of its own.

Outside the cut regions all ranks have the same activations and must drop the same elements: their
generators are in the same state. Inside attention, and between the regions where the sequence is
cut as well, each rank needs a mask of its own, and the generators must agree again afterwards.

Shoeybi et al. 2019 (arXiv 1909.08053), appendix B.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.common import gpu

Group = dist.ProcessGroup


def draw_apart(module: nn.Module, group: Group) -> None:
    """Let `module` draw other random numbers on each rank of `group` when it is called."""
    if group.size() > 1:
        module.forward = partial(_forward, module, group)


def _forward(module: nn.Module, group: Group, x: Tensor) -> Tensor:
    if not module.training:
        return type(module).forward(module, x)
    with own_seed(group, x.device):
        return type(module).forward(module, x)


@contextmanager
def own_seed(group: Group, device: torch.device) -> Iterator[None]:
    """Seed this rank's generator by its rank, and restore the generator afterwards."""
    # All ranks draw the same number here, so their generators stay in step. Recomputation, which
    # sets the generator back to where it was, draws the same again.
    seed = int(torch.randint(2**62, (), device="cpu")) + dist.get_rank(group)
    generator = torch.default_generator
    if gpu.is_on(device):
        generator = gpu.module().default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
