"""Where tests compute: on the device that a rank has, a GPU where there is one."""

from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.common import gpu


def here(thing: Any) -> Any:
    """A module, a tensor, or a list or tuple of them, on this rank's device.

    Outside of a run it is left where it is: pytest's own process keeps away from CUDA, so that
    ranks can be forked.
    """
    if not dist.is_initialized():
        return thing
    if isinstance(thing, (list, tuple)):
        return type(thing)(here(part) for part in thing)
    return thing.to(ranks.device())


def random_state() -> torch.Tensor:
    """Where the random numbers of this rank's device stand."""
    cpu = ranks.device().type == "cpu"
    return torch.get_rng_state() if cpu else gpu.module().get_rng_state(ranks.device())
