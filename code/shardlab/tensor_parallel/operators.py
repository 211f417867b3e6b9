"""What stands at the edges of a region in which every rank has a share of a layer's features.

Outside of the region all ranks hold the same activations, inside each has its own part of them. An
edge is an operator with a forward and a backward of its own, and they come in conjugate pairs: what
one does forward, the other does backward.

    operator       forward                backward
    copy_to        nothing                all-reduce         Megatron's f, where a region begins
    reduce_from    all-reduce             nothing            Megatron's g, where it ends
    gather_last    all-gather             keep own slice
    split_last     keep own slice         all-gather

Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3. On a group of one rank nothing is
sent and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.ranks.renamed import all_gather_single

Group = dist.ProcessGroup
Finish = Callable[[], Tensor]


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Give `x` [any shape], which all ranks have, to layers of which each rank has a part.

    Each rank's layers see all of `x`, and give it a gradient that knows of them alone: backward
    adds these up. Without that every rank would train on, each with a part of the truth.
    """
    return _CopyTo.apply(x, group) if ranks_in(group) > 1 else x


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' `x` [any shape], on all of them.

    Backward sends nothing: each of the addends has the sum's gradient, which all ranks have.
    """
    return _ReduceFrom.apply(x, group, False) if ranks_in(group) > 1 else x


def reduce_from_(x: Tensor, group: Group) -> Tensor:
    """`reduce_from` in place: `x` becomes the sum. For what was just computed and nobody keeps."""
    return _ReduceFrom.apply(x, group, True) if ranks_in(group) > 1 else x


def gather_last(x: Tensor, group: Group) -> Tensor:
    """All ranks' `x` [..., n] side by side: [..., t n]."""
    return _GatherLast.apply(x, group) if ranks_in(group) > 1 else x


def split_last(x: Tensor, group: Group) -> Tensor:
    """This rank's slice [..., n / t] of `x` [..., n], which all ranks have.

    Raises ValueError where the ranks do not divide n.
    """
    share("last dimension of x", x.shape[-1], group)
    return _SplitLast.apply(x, group) if ranks_in(group) > 1 else x


@dataclass(frozen=True)
class Edges:
    """The two operators around a region: how activations get in, and how they get out.

    `enter` stands in front of an attention, a feed-forward network or the head, `leave` behind the
    product that ends one, and behind the embedding. `leave` may change the tensor that it is given.

    begin, back: start what `enter` does forward and backward, and return a function that waits and
    gives the result; `back` may change what it is given. With them, `columns` sends while it
    computes; None: `enter` and the layers behind it stand one after the other. keep: hold on to
    what has entered until backward; otherwise to what was there before, which enters once more.
    """

    enter: Callable[[Tensor, Group], Tensor]
    leave: Callable[[Tensor, Group], Tensor]
    begin: Callable[[Tensor, Group], Finish] | None = None
    back: Callable[[Tensor, Group], Finish] | None = None
    keep: bool = True


def ranks_in(group: Group) -> int:
    """How many ranks `group` has; ValueError unless it is a process group that holds this rank."""
    if not isinstance(group, dist.ProcessGroup):  # who is not in a group has something else for it
        raise ValueError(f"group={group!r}: allowed is a process group that holds this rank")
    return group.size()


def share(name: str, size: int, group: Group) -> slice:
    """Which part of `size` is this rank's; `name` is what the size is called.

    Raises ValueError where the group's ranks do not divide it, with the nearest sizes that they do.
    """
    ranks = ranks_in(group)
    if size % ranks:
        raise ValueError(f"{name}={size}: allowed on {ranks} ranks are {multiples(size, ranks)}")
    part = size // ranks
    begin = dist.get_rank(group) * part
    return slice(begin, begin + part)


def multiples(size: int, ranks: int) -> str:
    """The multiples of `ranks`, by those nearest to `size`, in words."""
    below = size - size % ranks
    nearest = f"{below} or {below + ranks}" if below else f"{ranks}"
    return f"multiples of {ranks}, such as {nearest}"


def gathered_last(x: Tensor, group: Group) -> Tensor:
    """All ranks' `x` [..., n] in one tensor [..., t n], without a backward."""
    ranks = ranks_in(group)
    parts = x.new_empty((ranks, *x.shape))
    # [..., n] to [t, ..., n]
    all_gather_single(parts.view(-1), x.contiguous().view(-1), group=group)
    return parts.movedim(0, -2).flatten(-2)  # to [..., t, n] to [..., t n]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        total = dx.clone(memory_format=torch.contiguous_format)  # dx may be others' as well
        dist.all_reduce(total, group=ctx.group)  # of x's shape
        return total, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, in_place: bool) -> Tensor:
        if in_place and x.is_contiguous():
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)  # of x's shape
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return dx, None, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gathered_last(x, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx[..., share("last dimension", dx.shape[-1], ctx.group)], None


class _SplitLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x[..., share("last dimension of x", x.shape[-1], group)].contiguous()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return gathered_last(dx, ctx.group), None
