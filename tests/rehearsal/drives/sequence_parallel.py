"""The edges that cut a tensor-parallel model's stream by tokens."""

from __future__ import annotations

import torch

from shardlab import ranks
from shardlab import sequence_parallel as sp

from .common import near, on, world


@on(1, 2, 4, daily=(2,))
def edges():
    group, rank, size = world()
    torch.manual_seed(0)
    x, dy = torch.randn(2, size, 2, 4 * size, 8, device=ranks.device())
    for sequence in (x, x[:, :1]):  # gathered pieces of one sequence are one without a copy
        share = sequence[0].chunk(size, 1)[rank].clone().requires_grad_()
        whole = sp.ALONG_SEQUENCE.enter(share, group)
        near(whole, sequence[0], 0.0)
        whole.backward(dy[rank, : len(sequence[0])])
        near(share.grad, dy[:, : len(sequence[0])].sum(0).chunk(size, 1)[rank], 1e-5)
        addend = sequence[rank].clone().requires_grad_()
        mine = sp.ALONG_SEQUENCE.leave(addend, group)
        near(mine, sequence.sum(0).chunk(size, 1)[rank], 1e-5)
        mine.sum().backward()
        near(addend.grad, torch.ones_like(addend), 0.0)
