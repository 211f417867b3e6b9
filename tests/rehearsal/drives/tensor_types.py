"""Types of operators, by numbers; a model that is checked while it trains."""

from __future__ import annotations

import torch

from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab import tensor_types as tt
from shardlab.gpt.model import GPT
from shardlab.tensor_types.adjoint import find_contradictions

from .common import GPT2, batch, model, on, world


@on(1, 2, 4, daily=(2,))
def words():
    group, _, size = world()
    if size == 1:
        return
    assert not find_contradictions(tp.copy_to, "I -> R", group)
    assert not find_contradictions(tp.gather_last, "V -> I", group)
    assert not find_contradictions(
        sp.SEQUENCE_SHARDED.leave_region, "P -> V", group, (2, size, 4), 1
    )
    assert find_contradictions(tp.copy_to, "I -> I", group)


def followed():
    """The checker reads no values, and so needs nothing of the device."""
    group = world()[0]
    mine = tp.parallelize(model(GPT2), group)
    with tt.check_types(tp=group) as mode:
        tt.declare_parameters(mine, tp=tp.get_parameter_types(mine))
        x, y = (tt.declare_types(part, tp="R") for part in batch(GPT2))
        tp.vocab_parallel_loss(mine(x), y, group).backward()
        torch.optim.AdamW(mine.parameters()).step()
    assert mode.num_backwards == 1 and isinstance(mine, GPT)
