"""ZeRO's three stages, a few steps of AdamW each."""

from __future__ import annotations

from typing import Any

import torch

from shardlab import zero
from shardlab.model import loss

from .common import batch, near, on, share, twice, waits, world


def _trained(stage: int, equal: bool = True, steps: int = 3, **options: Any) -> None:
    plain, mine = twice()
    mine = zero.shard(mine, world()[0], stage, **options)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False)) for m in (mine, plain)]
    for step in range(steps):
        x, y = batch(step=step)
        for (m, optimizer), a, b in zip(pairs, (share(x), x), (share(y), y), strict=True):
            optimizer.zero_grad()
            loss(m(a), b).backward()
        norm = mine.clip_grad_norm_(0.5)
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        if equal:
            near(norm, wanted, 1e-3)
        for _, optimizer in pairs:
            optimizer.step()
    state = mine.full_state_dict()
    for name, value in plain.state_dict().items() if equal else ():
        near(state[name], value, 3e-3)  # AdamW: what is near zero may take another sign
    mine.load_full_state_dict(state)


def stage_1():
    _trained(1)


@on(1, 2, 4)
def stage_2():
    _trained(2)


@on(1, 2, 4)
def stage_3():
    _trained(3)


def bf16():
    for stage in (1, 3):
        _trained(stage, equal=False, steps=1, compute_dtype=torch.bfloat16)


@on(1, 2, 4)
def ordered():
    for stage in (2, 3):
        _trained(stage, steps=2, reduction="ordered")


def hot_path():
    for stage in (1, 2, 3):
        mine = zero.shard(twice()[1], world()[0], stage)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)
        x, y = map(share, batch())
        for step in range(2):
            optimizer.zero_grad()
            with waits() as found:
                loss(mine(x), y).backward()
            optimizer.step()
            if step:  # the first one makes connections
                assert not found, f"the host waits at {found}"
