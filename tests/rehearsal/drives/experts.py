"""Experts over ranks: the exchange, a model's step, its balance, its states."""

from __future__ import annotations

import torch

from shardlab import experts, ranks

from .common import near, on, world


def _rows() -> tuple[torch.Tensor, list[int], list[int]]:
    """Rows of this rank, how many it sends to each, and how many come: rank r sends r + j to j."""
    _, rank, size = world()
    sent, received = ([rank + j for j in range(size)] for _ in range(2))
    return torch.full((sum(sent), 3), float(rank), device=ranks.device()), sent, received


@on(1, 2, 4, daily=(2,))
def exchange():
    group = world()[0]
    x, sent, received = _rows()
    x.requires_grad_()
    y = experts.exchange(x, sent, received, group)
    wanted = [rank for rank, rows in enumerate(received) for _ in range(rows)]
    near(y[:, 0], torch.tensor(wanted, device=y.device, dtype=y.dtype), 0.0)
    y.backward(y.detach())
    near(x.grad, x, 0.0)
