"""Device of a test: the rank's own device, a GPU if there is one."""

from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.common import gpu


def to_device(thing: Any) -> Any:
    """Move a module, a tensor, or a list or tuple of them to this rank's device.

    Outside of a rank nothing moves: pytest's own process must not use CUDA, so that ranks can be
    forked.
    """
    if not dist.is_initialized():
        return thing
    if isinstance(thing, (list, tuple)):
        return type(thing)(to_device(part) for part in thing)
    return thing.to(ranks.device())


def get_random_state() -> torch.Tensor:
    cpu = ranks.device().type == "cpu"
    return torch.get_rng_state() if cpu else gpu.get_device_module().get_rng_state(ranks.device())
