"""Experts over ranks: the exchange, a model's step, its balance, its states."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardlab import collectives, experts, ranks

from .common import near, on, solution, world


def _rows() -> tuple[torch.Tensor, list[int], list[int]]:
    """Rows of this rank, how many it sends to each, and how many come: rank r sends r + j to j."""
    _, rank, size = world()
    sent, received = ([rank + j for j in range(size)] for _ in range(2))
    return torch.full((sum(sent), 3), float(rank), device=ranks.device()), sent, received


@on(1, 2, 4)
def exchange():
    group = world()[0]
    x, sent, received = _rows()
    x.requires_grad_()
    y = experts.exchange(x, sent, received, group)
    wanted = [rank for rank, rows in enumerate(received) for _ in range(rows)]
    near(y[:, 0], torch.tensor(wanted, device=y.device, dtype=y.dtype), 0.0)
    y.backward(y.detach())
    near(x.grad, x, 0.0)


@on(1, 2, 4)
def solutions():
    x, sent, received = _rows()
    got = solution("experts", "ex-experts-exchange", collectives=collectives)
    near(got(x, sent, received, world()[0]), experts.exchange(x, sent, received, world()[0]), 0.0)

    group, rank, size = world()
    torch.manual_seed(0)
    scores = torch.rand(4 * size, 4).softmax(-1).to(ranks.device())
    chosen = scores.topk(2).indices
    got = solution("experts", "ex-experts-balance")
    value = got(scores.chunk(size)[rank], chosen.chunk(size)[rank], group)
    dist.all_reduce(value, group=group)
    load = torch.bincount(chosen.flatten(), minlength=4) / chosen.numel()
    near(value / size, 4 * (load * scores.mean(0)).sum())
