"""Pairs of messages in place of an all-to-all; a rank's own rows do not travel."""

import torch
import torch.distributed as dist
from torch import nn


def exchange(pieces, shapes, group):
    """pieces: for each rank; returns what each has for this one."""
    me, names = group.rank(), dist.get_process_group_ranks(group)
    got = [pieces[r] if r == me else pieces[r].new_empty(shapes[r]) for r in range(len(names))]
    works = []
    for r, name in enumerate(names):
        if r != me and got[r].numel():
            works.append(dist.irecv(got[r], name, group=group))
    for r, name in enumerate(names):
        if r != me and pieces[r].numel():
            works.append(dist.isend(pieces[r].contiguous(), name, group=group))
    for work in works:
        work.wait()
    return got


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, to, here, group):
        ctx.how = to, here, group
        shapes = [(c, rows.shape[1]) for c in here]
        return torch.cat(exchange(rows.detach().split(to), shapes, group))

    @staticmethod
    def backward(ctx, grad):
        to, here, group = ctx.how
        shapes = [(c, grad.shape[1]) for c in to]
        return torch.cat(exchange(grad.split(here), shapes, group)), None, None, None


class ExpertParallel(nn.Module):
    def __init__(self, experts, group):
        super().__init__()
        self.experts, self.group = nn.ModuleList(experts), group

    def forward(self, x, chosen, weights):
        n, local = self.group.size(), len(self.experts)
        token, slot = torch.meshgrid(*(torch.arange(s) for s in chosen.shape), indexing="ij")
        expert = chosen.reshape(-1)
        order = torch.sort(expert, stable=True).indices
        token, slot = token.reshape(-1)[order], slot.reshape(-1)[order]
        counts = torch.zeros(n * local, dtype=torch.int64).index_add(
            0, expert, torch.ones_like(expert)
        )
        theirs = exchange(counts.view(n, local), [(local,)] * n, self.group)
        theirs = torch.stack(list(theirs))
        to, here = counts.view(n, local).sum(1).tolist(), theirs.sum(1).tolist()
        rows = Swap.apply(x[token], to, here, self.group)
        chunks = rows.split(theirs.reshape(-1).tolist())  # [rank, expert] in that order
        made = [None] * len(chunks)
        for e, expert in enumerate(self.experts):
            mine = chunks[e::local]
            outputs = expert(torch.cat(mine)).split([len(c) for c in mine])
            made[e::local] = outputs
        back = Swap.apply(torch.cat(made), here, to, self.group)
        y = x.new_zeros(x.shape)
        return y.index_put((token,), back * weights[token, slot].unsqueeze(1), accumulate=True)
