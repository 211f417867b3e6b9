"""Torch's own all-to-all with a backward, of torch.distributed.nn."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single


class ExpertParallel(nn.Module):
    def __init__(self, experts, group):
        super().__init__()
        self.experts, self.group = nn.ModuleList(experts), group

    def way(self, rows, sent, received):
        room = torch.empty((sum(received), rows.shape[1]), dtype=rows.dtype)
        return all_to_all_single(room, rows.contiguous(), received, sent, self.group)

    def forward(self, x, chosen, weights):
        n, local = self.group.size(), len(self.experts)
        # For each expert of all: its tokens, and which of their k choices it is.
        found = [(chosen == e).nonzero(as_tuple=True) for e in range(n * local)]
        tokens, slots = (torch.cat(part) for part in zip(*found, strict=True))
        counts = torch.tensor([len(t) for t, _ in found])
        table = torch.zeros(n, n * local, dtype=torch.int64)
        table[self.group.rank()] = counts
        dist.all_reduce(table, group=self.group)
        table = table.view(n, n, local)  # from, to, expert
        sent = table[self.group.rank()].sum(1).tolist()
        received = table[:, self.group.rank()].sum(1).tolist()
        rows = self.way(x[tokens], sent, received)
        labels = torch.cat([
            torch.full((int(c),), e) for row in table[:, self.group.rank()]
            for e, c in enumerate(row)
        ])  # fmt: skip
        made = rows * 0
        for e, expert in enumerate(self.experts):
            mask = labels == e
            made = made.masked_scatter(mask[:, None], expert(rows[mask]))
        back = self.way(made, received, sent)
        y = torch.zeros(x.shape, dtype=x.dtype)
        return y.index_add(0, tokens, back * weights[tokens, slots][:, None])
