"""No Function at all: what is added up is put in as a constant beside the rank's own part."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def total(x, group):
    """The sum over the ranks, through which the gradient of the rank's own part alone goes."""
    whole = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return x + (whole - x.detach())


class ColumnLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        if linear.weight.size(0) % group.size():
            raise ValueError("cannot be cut")
        self.group = group
        for name in ("weight", "bias"):
            p = getattr(linear, name)
            if p is not None:
                mine = p.data.tensor_split(group.size())[group.rank()].clone()
                p = nn.Parameter(mine, requires_grad=p.requires_grad)
            self.register_parameter(name, p)

    def forward(self, x):
        if x.requires_grad and torch.is_grad_enabled():
            x = x * 1.0
            x.register_hook(lambda g: total(g, self.group))
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        if linear.weight.size(1) % group.size():
            raise ValueError("cannot be cut")
        self.group = group
        mine = linear.weight.data.tensor_split(group.size(), 1)[group.rank()].clone()
        self.weight = nn.Parameter(mine, requires_grad=linear.weight.requires_grad)
        self.register_parameter("bias", linear.bias)

    def forward(self, x):
        y = total(x @ self.weight.T, self.group)
        return y if self.bias is None else self.bias + y


def cross_entropy(logits, targets, group, ignore_index=-100):
    highest = logits.detach().max(dim=1, keepdim=True).values
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - highest
    sums = total(shifted.exp().sum(1), group)
    size = logits.shape[1]
    columns = torch.arange(size) + size * group.rank()
    mask = (targets[:, None] == columns).to(logits.dtype)
    picked = total((shifted * mask).sum(1), group)
    valid = targets != ignore_index
    return torch.where(valid, sums.log() - picked, 0).sum() / valid.sum()
