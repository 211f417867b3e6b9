"""The edges that cut a tensor-parallel model's stream by tokens, and dropout of a rank's tokens."""

from __future__ import annotations

import torch
from torch import nn

from shardlab import ranks
from shardlab import sequence_parallel as sp

from .common import near, on, world


@on(1, 2, 4)
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


@on(1, 2, 4)
def token_dropout():
    group, rank, size = world()
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = (torch.randn(2, 16, 8, device=ranks.device(), dtype=dtype) for _ in range(2))
        x.requires_grad_()
        share = x.detach().chunk(size, 1)[rank].clone().requires_grad_()
        torch.manual_seed(1)
        wanted = nn.Dropout(0.3)(x)
        state = torch.cuda.get_rng_state()
        torch.manual_seed(1)
        mine = sp.TokenDropout(0.3, group)(share)
        near(mine, wanted.chunk(size, 1)[rank], 0.0)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        wanted.backward(dy)
        mine.backward(dy.chunk(size, 1)[rank])
        near(share.grad, x.grad.chunk(size, 1)[rank], 0.0)
