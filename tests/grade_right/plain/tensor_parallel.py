"""Two functions that are each other's transpose: to copy, and to add up."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def take_shard(p, dim, group):
    if p.shape[dim] % group.size():
        raise ValueError(f"{p.shape[dim]} is not divided by {group.size()} ranks")
    mine = p.detach().chunk(group.size(), dim)[group.rank()]
    return nn.Parameter(mine.clone(), requires_grad=p.requires_grad)


class ColumnLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        self.weight = take_shard(linear.weight, 0, group)
        self.bias = None if linear.bias is None else take_shard(linear.bias, 0, group)

    def forward(self, x):
        return F.linear(Copy.apply(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        self.weight = take_shard(linear.weight, 1, group)
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)

    def forward(self, x):
        y = Sum.apply(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def cross_entropy(logits, targets, group, ignore_index=-100):
    first = group.rank() * logits.shape[1]
    highest = logits.detach().amax(1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    logits = logits - highest[:, None]
    total = Sum.apply(logits.exp().sum(1), group)
    local = targets - first
    here = (local >= 0) & (local < logits.shape[1])
    picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    picked = Sum.apply(picked * here, group)
    losses = total.log() - picked
    counts = targets != ignore_index
    return losses[counts].sum() / counts.sum()
