"""One Function that adds up in forward or in backward; layers that are torch's own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, when):
        ctx.group, ctx.when = group, when
        return reduced(x, group) if when == "forward" else x.view(x.shape)

    @staticmethod
    def backward(ctx, g):
        return reduced(g, ctx.group) if ctx.when == "backward" else g, None, None


def reduced(x, group):
    x = x.detach().contiguous().clone()
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    return x


class ColumnLinear(nn.Linear):
    def __init__(self, linear, group):
        n = group.size()
        if linear.out_features % n:
            raise ValueError(f"out_features={linear.out_features}, n={n}")
        out = linear.out_features // n
        super().__init__(linear.in_features, out, linear.bias is not None,
                         dtype=linear.weight.dtype)  # fmt: skip
        self.group = group
        with torch.no_grad():
            for mine, whole in zip(self.parameters(), linear.parameters(), strict=True):
                mine.copy_(whole[out * group.rank() : out * (group.rank() + 1)])
                mine.requires_grad = whole.requires_grad

    def forward(self, x):
        return super().forward(_Reduce.apply(x, self.group, "backward"))


class RowLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        if linear.in_features % group.size():
            raise ValueError(f"in_features={linear.in_features}, n={group.size()}")
        per = linear.in_features // group.size()
        columns = torch.arange(per) + per * group.rank()
        self.weight = nn.Parameter(linear.weight.detach()[:, columns])
        self.weight.requires_grad_(linear.weight.requires_grad)
        self.bias = linear.bias

    def forward(self, x):
        y = _Reduce.apply(F.linear(x, self.weight), self.group, "forward")
        return y + self.bias if self.bias is not None else y


def cross_entropy(logits, targets, group, ignore_index=-100):
    offset = dist.get_rank(group) * logits.size(1)
    own = logits.logsumexp(1)
    most = own.detach().clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    numerator = _Reduce.apply((own - most).exp(), group, "forward")
    one_hot = F.one_hot((targets - offset).clamp(-1, logits.size(1)) + 1, logits.size(1) + 2)
    picked = torch.where(one_hot[:, 1:-1] == 1, logits, 0.0).sum(1)
    losses = numerator.log() + most - _Reduce.apply(picked, group, "forward")
    weights = (targets != ignore_index).to(losses.dtype)
    return losses @ (weights / weights.sum())
