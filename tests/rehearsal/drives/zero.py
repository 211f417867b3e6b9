"""ZeRO with weights of 16 bits in its modules; for the rest see `contract`."""

from __future__ import annotations

import torch

from shardlab import zero
from shardlab.gpt.model import loss

from .common import batch, local_batch, model, world


def bf16():
    for stage in (1, 3):
        mine = zero.shard_module(model(), world()[0], stage, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3, foreach=False)
        x, y = map(local_batch, batch())
        loss(mine(x), y).backward()
        assert mine.clip_grad_norm_(0.5) > 0
        optimizer.step()
        mine.load_full_state_dict(mine.full_state_dict())
