"""Dropout of this rank's tokens, with the bits that nn.Dropout has in one process.

Shapes: B batch, S tokens in all, s = S/t of one rank, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardlab.common import gpu
from shardlab.common.arguments import check_kind, check_number
from shardlab.ranks import check_group


class TokenDropout(nn.Module):
    """Dropout of this rank's tokens that agrees with nn.Dropout in one process.

    Every rank draws the mask of the whole sequence and uses its own tokens' part: the same bits as
    one process that starts from the same random state, on the same kind of device, where x is
    contiguous. It costs the drawing of t times as many numbers, and for a moment two tensors of the
    whole sequence (on a GPU also their mask, a byte each); for backward a rank keeps its own part.
    """

    def __init__(self, p: float, group: dist.ProcessGroup):
        super().__init__()
        check_number(0, 1, p=p)
        check_group(group)
        self.p, self.group = p, group

    def forward(self, x_BsH: Tensor) -> Tensor:
        """[B, s, H] to [B, s, H]."""
        if not self.training or not self.p:
            return x_BsH
        rank, ranks = check_group(self.group)
        if gpu.is_on(x_BsH.device) and self.p < 1:
            return _Fused.apply(x_BsH, self.p, rank, ranks)
        batch, local_seq, *rest = x_BsH.shape
        ones_BSH = torch.ones(
            (batch, ranks * local_seq, *rest), dtype=x_BsH.dtype, device=x_BsH.device
        )
        mask_BSH = F.dropout(ones_BSH, self.p, inplace=True)  # 0, or 1 / (1 - p)
        # A copy: backward keeps it, and a view would keep the whole mask alive.
        return x_BsH * mask_BSH.chunk(ranks, 1)[rank].clone()

    def extra_repr(self) -> str:
        """What print(module) shows."""
        return f"p={self.p}"


class _Fused(torch.autograd.Function):
    """nn.Dropout's own kernel on a GPU, which draws and multiplies at once, in place never.

    So this rank's tokens go through it at their place in a whole sequence, of which the rest may be
    anything. Its mask has a byte for each element.
    """

    @staticmethod
    def forward(ctx: Any, x_BsH: Tensor, p: float, rank: int, ranks: int) -> Tensor:
        batch, local_seq, *rest = x_BsH.shape
        full_BSH = x_BsH.new_empty((batch, ranks * local_seq, *rest))
        full_BSH.chunk(ranks, 1)[rank].copy_(x_BsH)
        y_BSH, mask_BSH = torch.native_dropout(full_BSH, p, True)
        ctx.scale = 1 / (1 - p)
        # Copies: views would keep the wholes alive.
        ctx.save_for_backward(mask_BSH.chunk(ranks, 1)[rank].clone())
        return y_BSH.chunk(ranks, 1)[rank].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BsH: Tensor) -> tuple[Tensor | None, ...]:
        dx_BsH = torch.ops.aten.native_dropout_backward(dy_BsH, *ctx.saved_tensors, ctx.scale)
        return dx_BsH, None, None, None


def slice_dropouts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Put a `TokenDropout` in the place of every nn.Dropout, where it drops tokens of this rank."""
    check_kind(nn.Module, model=model)
    check_group(group)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, TokenDropout(child.p, group).train(child.training))
