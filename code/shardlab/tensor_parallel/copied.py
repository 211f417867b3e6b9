"""Heads of keys and values that several ranks have: their gradients are sums over these ranks.

Llama 3 has eight of them, Qwen3's models with experts four. Sixteen ranks have them twice or four
times, each rank the one that its heads of queries look at. All copies begin alike, and each has a
gradient that knows of its own rank's queries. What their sum is applied to stays alike.

The sum is one all-reduce of all heads, in which a rank's own stand at their place and the others
are zeros: no group of ranks is needed beside the tensor group. It is a message of K*D*H numbers for
each of the two matrices, in each backward: as an activation of K*D tokens.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardlab.ranks import check_group
from shardlab.tensor_types.operator import Operator


def used(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a cut `layer`, as forward uses them."""
    pair = layer.weight, layer.bias
    parts, ranks = getattr(layer, "parts", None), check_group(layer.group)[1]
    if parts is None or parts == ranks:
        return pair
    weight, bias = (x if x is None else _Copied.apply(x, layer.group, parts) for x in pair)
    return weight, bias


class _Copied(Operator):
    words = "V -> V"  # see tensor_types

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
        ctx.group, ctx.parts = group, parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        rank, ranks = check_group(ctx.group)
        total = dx.new_zeros((ctx.parts, *dx.shape))
        own = total[rank * ctx.parts // ranks]
        own.copy_(dx)
        dist.all_reduce(total, group=ctx.group)  # [parts, dx's shape]
        return own.clone(), None, None  # a view would keep all of it
