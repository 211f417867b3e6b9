"""ZeRO from scratch: data parallelism that shards what plain data parallelism replicates.

In plain data parallelism every rank holds the parameters, gradients and optimizer states of the
whole model. With ZeRO each rank owns a shard of some of these:

1. `Zero1`: the optimizer states;
2. `Zero2`: also the gradients, which are reduce-scattered as they arrive;
3. `Zero3`: also the parameters, which are gathered just before they are used.

`shard_module(module, group, stage)` makes one of them. A training step is in two files: `core` has
the stages, `flat` the flat tensors of N equal shards. torch's optimizers see only this rank's
shard. `units` decides what stage 3 gathers together; `wrapper` does the work between steps, with
`checkpointing`, which converts between flat pieces and full tensors; `predict` has formulas.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

# ruff: noqa: F401 - the names of the package

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from .checkpointing import init_optimizer_states
from .core import Unit, Zero1, Zero2, Zero3
from .flat import FlatGrads, FlatParams, Reducer, ReduceScatter, all_gather
from .predict import predict_sent_bytes, predict_state_bytes
from .wrapper import ShardedModule

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}


def shard_module(
    module: nn.Module, group: dist.ProcessGroup, stage: int, **options: Any
) -> Zero1 | Zero2 | Zero3:
    """Shard `module` over `group` in a ZeRO stage; options are those of the stage's class."""
    if type(stage) is not int or stage not in STAGES:
        raise ValueError(f"stage={stage!r}: must be 1, 2 or 3")
    return STAGES[stage](module, group, **options)
