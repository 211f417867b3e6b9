"""The other conjugate pair of operators: gather along the last dimension, or keep a slice of it.

    operator       forward            backward
    gather_last    all-gather         keep own slice
    split_last     keep own slice     all-gather

With them a matrix can be cut by rows first and by columns afterwards, at the cost of more bytes,
and the output of a column-parallel layer can be made whole. On a group of one rank nothing is sent
or copied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardlab.ranks import check_group
from shardlab.ranks.gather import gather_parts
from shardlab.tensor_types.operator import Operator

from .core import Group, shard_slice


def gather_last(x: Tensor, group: Group) -> Tensor:
    """Concatenate all ranks' `x` [..., n] along the last dimension: [..., t n]."""
    return _GatherLast.apply(x, group) if check_group(group)[1] > 1 else x


def split_last(x: Tensor, group: Group) -> Tensor:
    """Return this rank's slice [..., n / t] of `x` [..., n], which all ranks have.

    Raises ValueError if the ranks do not divide n.
    """
    shard_slice("last dimension of x", x.shape[-1], group)
    return _SplitLast.apply(x, group) if check_group(group)[1] > 1 else x


class _GatherLast(Operator):
    signature = "V -> I"  # see tensor_types

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gather_parts(x, -1, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx[..., shard_slice("last dimension", dx.shape[-1], ctx.group)], None


class _SplitLast(Operator):
    signature = "I -> V"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x[..., shard_slice("last dimension of x", x.shape[-1], group)].contiguous()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return gather_parts(dx, -1, ctx.group), None
