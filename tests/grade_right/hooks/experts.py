"""The whole layer is one Function: its backward sends gradients, and goes through the experts."""

import torch
import torch.distributed as dist
from torch import nn


def swap(rows, out_counts, in_counts, group):
    out = rows.new_empty(sum(in_counts), rows.shape[-1])
    dist.all_to_all_single(out, rows.contiguous(), in_counts, out_counts, group=group)
    return out


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle, x, weights, chosen, layer):
        n, local, group = layer.group.size(), len(layer.experts), layer.group
        k = chosen.shape[1]
        order = chosen.view(-1).argsort()
        counts = torch.stack([(chosen == e).sum() for e in range(n * local)]).view(n, local)
        every = [torch.empty_like(counts) for _ in range(n)]
        dist.all_gather(every, counts, group=group)
        mine = torch.stack([c[group.rank()] for c in every])  # [rank, my expert]
        to, here = counts.sum(1).tolist(), mine.sum(1).tolist()
        rows = swap(x.detach()[order // k], to, here, group)
        rows.requires_grad_(x.requires_grad)
        numbers = torch.cat([torch.arange(local).repeat_interleave(c) for c in mine])
        sort = numbers.argsort()
        with torch.enable_grad():
            pieces = rows[sort].split(mine.sum(0).tolist())
            made = torch.cat([e(p) for e, p in zip(layer.experts, pieces, strict=True)])
            made = made[sort.argsort()]
        back = swap(made.detach(), here, to, group)
        ctx.kept = rows, made, back, order, to, here, group, weights.detach()
        y = torch.zeros_like(x)
        y.index_add_(0, order // k, back * weights.detach().reshape(-1)[order, None])
        return y

    @staticmethod
    def backward(ctx, dy):
        rows, made, back, order, to, here, group, weights = ctx.kept
        k = weights.shape[1]
        dback = dy[order // k]
        dweights = torch.zeros_like(weights).view(-1)
        dweights[order] = (dback * back).sum(1)
        dx = None
        if made.requires_grad:
            dmade = swap(dback * weights.reshape(-1)[order, None], to, here, group)
            torch.autograd.backward(made, dmade)
            if rows.requires_grad:
                drows = swap(rows.grad, here, to, group)
                dx = torch.zeros_like(dy).index_add(0, order // k, drows)
        return None, dx, dweights.view_as(weights), None, None


class ExpertParallel(nn.Module):
    def __init__(self, experts, group):
        super().__init__()
        self.experts, self.group = nn.ModuleList(experts), group

    def forward(self, x, chosen, weights):
        handle = torch.zeros((), requires_grad=True)
        return Layer.apply(handle, x, weights, chosen, self)
