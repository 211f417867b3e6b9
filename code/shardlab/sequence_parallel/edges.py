"""Megatron's sequence parallelism: what stands between the cut matrices is cut by tokens.

Tensor parallelism divides attention and the feed-forward network over t ranks, and leaves norms,
dropouts and the residual stream whole on every rank. They work on each token alone, so their tokens
can be shared out. At the two edges of a cut part stand then

    enter   all-gather along the sequence forward, reduce-scatter backward
    leave   reduce-scatter along the sequence forward, all-gather backward

in place of identity and all-reduce. An all-reduce is a reduce-scatter and an all-gather, so the
bytes on the wire are the same (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

What `enter` has gathered is an input of the cut matrices, whose backward needs it. Kept whole, it
would be the one large tensor that is not divided by t. So the share alone is kept, and gathered
once more in backward (`tensor_parallel.columns`): one all-gather more for each place of entry, half
as many bytes again in backward. `AlongSequence(keep=True)` does without.

Shapes: B batch, S tokens in all, s = S/t of one rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardlab.ranks import check_number
from shardlab.ranks.p2p import carrier
from shardlab.ranks.renamed import all_gather_single, reduce_scatter_single

from .layout import check_layout, check_seq, group_of, pieces, split

Finish = Callable[[], Tensor]


class AlongSequence:
    """The edges that `tensor_parallel.parallelize(…, edges=…)` puts around what is cut.

    keep: hold on to what was gathered until backward is over, instead of gathering it again.
    """

    def __init__(self, keep: bool = False):
        self.keep = keep

    def enter(self, x_BsH: Tensor, group: dist.ProcessGroup) -> Tensor:
        """All ranks' tokens, [B, S, H], from this rank's."""
        group_of(group)
        return _Enter.apply(x_BsH, group)

    def leave(self, y_BSH: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The sum of all ranks' y_BSH, but this rank's tokens alone, [B, s, H].

        Raises ValueError, before anything is sent, for a sequence that cannot be shared out.
        """
        ranks, _ = group_of(group)
        check_seq(y_BSH.shape[1], ranks, "contiguous")
        return _Leave.apply(y_BSH, group)

    def begin(self, x_BsH: Tensor, group: dist.ProcessGroup) -> Finish:
        """Start what `enter` does forward; see `tensor_parallel.Edges`."""
        group_of(group)
        return _gather(x_BsH, group)

    def back(self, dx_BSH: Tensor, group: dist.ProcessGroup) -> Finish:
        """Start what `enter` does backward."""
        return _scatter(dx_BSH, group)

    def __repr__(self) -> str:
        return f"AlongSequence(keep={self.keep})"


ALONG_SEQUENCE = AlongSequence()


def gather_sequence(x_BsH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`AlongSequence.enter` as a function: [B, s, H] to [B, S, H]."""
    return ALONG_SEQUENCE.enter(x_BsH, group)


def scatter_sequence(y_BSH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`AlongSequence.leave` as a function: [B, S, H] to the sum's [B, s, H]."""
    return ALONG_SEQUENCE.leave(y_BSH, group)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x_BsH, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_BSH: Tensor) -> tuple[Tensor, None]:
        return _scatter(dx_BSH, ctx.group)(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BSH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(y_BSH, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BsH: Tensor) -> tuple[Tensor, None]:
        return _gather(dy_BsH, ctx.group)(), None


def _gather(x_BsH: Tensor, group: dist.ProcessGroup) -> Finish:
    """Start to gather along the sequence; the result waits for it and returns [B, S, H]."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return lambda: x_BsH.clone()
    batch, share, hidden = x_BsH.shape
    parts = x_BsH.new_empty((ranks * batch, share, hidden))
    work = all_gather_single(parts, x_BsH.contiguous(), group=group, async_op=True)  # t [B, s, H]

    def finish() -> Tensor:
        work.wait()
        # Ranks come first in memory, sequences have to; one sequence is in order already.
        # (Megatron's tensors are [S, B, H], where there is never anything to copy.)
        return parts.view(ranks, batch, share, hidden).transpose(0, 1).flatten(1, 2)

    return finish


def _scatter(y_BSH: Tensor, group: dist.ProcessGroup) -> Finish:
    """Start to add up over the ranks; the result returns the sum's [B, s, H] of this rank.

    Every rank sends part j straight to rank j, which adds up what it gets in the order of the
    ranks: (t-1)/t of the bytes, as any reduce-scatter, where gloo's own would make an all-reduce.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return lambda: y_BSH.clone()
    parts_tBsH = y_BSH.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    if carrier(y_BSH.device, group) == "nccl":
        total_BsH = torch.empty_like(parts_tBsH[0])
        parts = parts_tBsH.flatten(0, 1)  # [t B, s, H] to [B, s, H]
        work = reduce_scatter_single(total_BsH, parts, group=group, async_op=True)
        return lambda: (work.wait(), total_BsH)[1]
    received_tBsH = torch.empty_like(parts_tBsH)
    work = dist.all_to_all_single(received_tBsH, parts_tBsH, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        total_BsH = received_tBsH[0] + received_tBsH[1]
        for part_BsH in received_tBsH[2:]:
            total_BsH += part_BsH
        return total_BsH

    return finish


def seen_partly(model: nn.Module) -> list[nn.Parameter]:
    """What is whole on every rank, but worked on this rank's tokens alone.

    Norms, and the biases that are added after `leave`. Modules that tensor parallelism has cut say
    in `cut` which of their parameters are; raises ValueError for a model that has none of them.
    """
    modules = list(model.modules())
    if not any(hasattr(module, "cut") for module in modules):
        raise ValueError(
            "model: no part of it is cut by tensor parallelism; allowed is what "
            "tensor_parallel.parallelize(model, group, edges=ALONG_SEQUENCE) returns"
        )
    found: dict[nn.Parameter, None] = {}
    for module in modules:
        cut = getattr(module, "cut", None)
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or (cut and name not in cut):
                found[parameter] = None
    return list(found)


@torch.no_grad()
def sum_gradients(
    model: nn.Module | Iterable[nn.Parameter], group: dist.ProcessGroup, scale: float = 1.0
) -> None:
    """Add up, over the ranks, the gradients of what saw its own rank's tokens; after backward.

    model: one with `ALONG_SEQUENCE` around its cut parts, of which `seen_partly` are meant, or the
    parameters themselves. One all-reduce for each dtype among them. The sum is multiplied by
    `scale`. All ranks went the same way through the model, so they have the same gradients to add.
    """
    group_of(group)
    check_number(0, scale=scale)
    try:
        chosen = seen_partly(model) if isinstance(model, nn.Module) else list(model)
    except TypeError:
        raise ValueError(f"model={model!r}: allowed are a module and its parameters") from None
    gradients = [p.grad for p in chosen if p.grad is not None]
    if dist.get_world_size(group) == 1 and scale == 1.0:
        return
    for dtype in sorted({g.dtype for g in gradients}, key=str):
        members = [g for g in gradients if g.dtype == dtype]
        flat = torch.cat([g.flatten() for g in members])
        dist.all_reduce(flat, group=group)
        flat *= scale
        for gradient, total in zip(members, flat.split([g.numel() for g in members]), strict=True):
            gradient.copy_(total.view_as(gradient))


class TokenDropout(nn.Module):
    """Dropout of this rank's tokens that agrees with nn.Dropout in one process.

    Every rank draws the mask of the whole sequence and uses its own tokens' part: the same bits as
    one process that starts from the same random state, on the same kind of device, where x is
    contiguous. It costs the drawing of t times as many numbers, and for a moment two tensors of the
    whole sequence (on a GPU also their mask, a byte each); for backward a rank keeps its own part.
    """

    def __init__(self, p: float, group: dist.ProcessGroup, layout: str = "contiguous"):
        super().__init__()
        check_layout(layout)
        if isinstance(p, bool) or not isinstance(p, Real) or not 0 <= p <= 1:
            raise ValueError(f"p={p!r}: allowed are numbers from 0 to 1")
        group_of(group)
        self.p, self.group, self.layout = p, group, layout

    def forward(self, x_BsH: Tensor) -> Tensor:
        """[B, s, H] to [B, s, H]."""
        if not self.training or not self.p:
            return x_BsH
        ranks, rank = group_of(self.group)
        if x_BsH.is_cuda and self.p < 1:
            return _Fused.apply(x_BsH, self.p, ranks, rank, self.layout)
        batch, share, *rest = x_BsH.shape
        ones_BSH = torch.ones((batch, ranks * share, *rest), dtype=x_BsH.dtype, device=x_BsH.device)
        mask_BSH = F.dropout(ones_BSH, self.p, inplace=True)  # 0, or 1 / (1 - p)
        # A copy: backward keeps it, and a view would keep the whole mask alive.
        return x_BsH * split(mask_BSH, ranks, rank, self.layout).clone()

    def extra_repr(self) -> str:
        """What print(module) shows."""
        return f"p={self.p}, layout={self.layout!r}"


class _Fused(torch.autograd.Function):
    """nn.Dropout's own kernel on a GPU, which draws and multiplies at once, in place never.

    So this rank's tokens go through it at their place in a whole sequence, of which the rest may be
    anything. Its mask has a byte for each element.
    """

    @staticmethod
    def forward(ctx: Any, x_BsH: Tensor, p: float, ranks: int, rank: int, layout: str) -> Tensor:
        mine = pieces(layout, ranks, rank)
        batch, share, *rest = x_BsH.shape
        whole_BSH = x_BsH.new_empty((batch, ranks * share, *rest))
        places = whole_BSH.chunk(ranks * len(mine), 1)
        for number, part in zip(mine, x_BsH.chunk(len(mine), 1), strict=True):
            places[number].copy_(part)
        y_BSH, mask_BSH = torch.native_dropout(whole_BSH, p, True)
        ctx.scale = 1 / (1 - p)
        # Copies: views would keep the wholes alive.
        ctx.save_for_backward(split(mask_BSH, ranks, rank, layout).clone())
        return split(y_BSH, ranks, rank, layout).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BsH: Tensor) -> tuple[Tensor | None, ...]:
        dx_BsH = torch.ops.aten.native_dropout_backward(dy_BsH, *ctx.saved_tensors, ctx.scale)
        return dx_BsH, None, None, None, None


def slice_dropouts(model: nn.Module, group: dist.ProcessGroup, layout: str = "contiguous") -> None:
    """Put a `TokenDropout` in the place of every nn.Dropout, where it drops tokens of this rank."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, TokenDropout(child.p, group, layout).train(child.training))
