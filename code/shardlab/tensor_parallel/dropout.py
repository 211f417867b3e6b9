"""Dropout of tensors that differ between ranks: each rank draws from its own seed.

Outside the cut regions all ranks have the same activations and must drop the same elements, so
their generators are in the same state. Inside attention, and between the regions if the sequence is
cut, each rank needs a mask of its own; afterwards the generators must be equal again.

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


def seed_per_rank(module: nn.Module, group: Group) -> None:
    """Make the forward of `module` draw different random numbers on each rank of `group`."""
    if group.size() > 1:
        module.forward = partial(_forward_with_own_seed, module, group)


def _forward_with_own_seed(module: nn.Module, group: Group, x: Tensor) -> Tensor:
    if not module.training:
        return type(module).forward(module, x)
    with own_seed(group, x.device):
        return type(module).forward(module, x)


@contextmanager
def own_seed(group: Group, device: torch.device) -> Iterator[None]:
    """Give this rank's generator a seed of its own inside, and restore its state afterwards."""
    # All ranks draw the same number here, so their generators stay equal. Recomputation restores
    # the generator's state first, and so draws the same number again.
    seed = int(torch.randint(2**62, (), device="cpu")) + dist.get_rank(group)
    generator = torch.default_generator
    if gpu.is_gpu(device):
        generator = gpu.get_device_module().default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
