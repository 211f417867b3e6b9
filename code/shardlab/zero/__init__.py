"""ZeRO from scratch: data parallelism whose ranks do not all hold the same.

In plain data parallelism every rank holds parameters, gradients and optimizer states of the whole
model, and all hold the same. ZeRO's ranks own a shard each, of ever more of it:

1. `Zero1`: of the optimizer's states;
2. `Zero2`: of the gradients as well, which are reduce-scattered as they arrive;
3. `Zero3`: of the parameters as well, which are gathered just before they are used.

`shard(module, group, stage)` gives one of them. All stand on `Flat`, parameters side by side in
one tensor that falls into N equal shards, on two collectives, `all_gather` and `ReduceScatter`, and
on torch's own optimizers, which see nothing but the shard.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from .flat import Flat, ReduceScatter, all_gather, deal
from .gradients import Gradients
from .predict import predicted_sent, predicted_states
from .replicated import Zero1, Zero2
from .sharded import Sharded
from .units import Unit
from .zero3 import Zero3

__all__ = [
    "Flat",
    "Gradients",
    "ReduceScatter",
    "Sharded",
    "Unit",
    "Zero1",
    "Zero2",
    "Zero3",
    "all_gather",
    "deal",
    "predicted_sent",
    "predicted_states",
    "shard",
]

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}


def shard(
    module: nn.Module, group: dist.ProcessGroup, stage: int, **options: Any
) -> Zero1 | Zero2 | Zero3:
    """`module`, sharded over `group` in one of ZeRO's stages; options are those of its class."""
    if type(stage) is not int or stage not in STAGES:
        raise ValueError(f"stage={stage!r}: allowed are 1, 2 and 3")
    return STAGES[stage](module, group, **options)
