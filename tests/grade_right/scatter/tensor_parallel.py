"""Sums by a reduce-scatter and an all-gather; each layer is one Function with its own backward."""

import torch
import torch.distributed as dist
from torch import nn


def added(x, group):
    n = group.size()
    flat = x.reshape(-1)
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % n)])
    share = flat.new_empty(len(flat) // n)
    dist.reduce_scatter_tensor(share, flat, group=group)
    dist.all_gather_into_tensor(flat, share, group=group)
    return flat[: x.numel()].view(x.shape)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, column):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.column = group, column
        y = torch.matmul(x, weight.t())
        if not column:
            y = added(y, group)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        dx = dw = db = None
        if for_x:
            dx = torch.matmul(grad, weight)
            dx = added(dx, ctx.group) if ctx.column else dx
        rows = grad.reshape(-1, grad.shape[-1])
        if for_weight:
            dw = rows.t() @ x.reshape(-1, x.shape[-1])
        if for_bias:
            db = rows.sum(0)
        return dx, dw, db, None, None


class _Cut(nn.Module):
    column = True

    def __init__(self, linear, group):
        super().__init__()
        self.group, n, r = group, group.size(), group.rank()
        size = linear.out_features if self.column else linear.in_features
        if size % n != 0:
            raise ValueError("sizes")
        w, b = linear.weight.detach(), linear.bias
        w = w.view(n, -1, w.shape[1])[r] if self.column else w.view(len(w), n, -1)[:, r]
        self.weight = nn.Parameter(w.clone(), requires_grad=linear.weight.requires_grad)
        if b is None:
            self.register_parameter("bias", None)
        else:
            kept = b.detach().view(n, -1)[r] if self.column else b.detach()
            self.bias = nn.Parameter(kept.clone(), requires_grad=b.requires_grad)

    def forward(self, x):
        return Linear.apply(x, self.weight, self.bias, self.group, self.column)


class ColumnLinear(_Cut):
    pass


class RowLinear(_Cut):
    column = False


def cross_entropy(logits, targets, group, ignore_index=-100):
    """Each rank's own log-sum-exp and picked logit are gathered, three numbers a token."""
    keep = targets != ignore_index
    n, size = group.size(), logits.shape[1]
    place = torch.where(keep, targets, 0) - group.rank() * size
    inside = (place >= 0) & (place < size)
    picked = logits.gather(1, place.clamp(0, size - 1).view(-1, 1)).squeeze(1) * inside
    mine = torch.stack([logits.logsumexp(1), picked])  # [2, tokens]
    every = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(every, mine.detach(), group=group)
    every[group.rank()] = mine
    logs = torch.stack([e[0] for e in every]).logsumexp(0)
    return (logs - sum(e[1] for e in every))[keep].mean()
