"""Tensor parallelism: loss, gradients, dropout, states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.model import GPT, Config, loss

from .common import GPT2, LLAMA, batch, model, near, on, twice, waits, world


def _step(config: Config, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    plain, mine = twice(config, dtype)
    group = world()[0]
    mine = tp.parallelize(mine, group, **options)
    x, y = batch(config)
    value, wanted = tp.loss(mine(x), y, group), loss(plain(x), y)
    near(value, wanted, 1e-4 if dtype == torch.float32 else 2e-2)  # bf16 has 8 bits
    value.backward()
    wanted.backward()
    if "edges" in options:
        sp.sum_gradients(mine, group)
    norm = tp.clip_grad_norm_(mine, 1.0)
    if dtype == torch.float32:
        near(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0), 1e-3)
    torch.optim.AdamW(mine.parameters()).step()
    tp.load_full_state_dict(mine, tp.full_state_dict(mine))
    tp.full_state_dict(mine, to=0)


@on(2)  # on a GPU that is shared, messages pass through the host
def hot_path():
    group = world()[0]
    for options in ({}, {"edges": sp.ALONG_SEQUENCE}):
        mine = tp.parallelize(twice(GPT2)[1], group, **options)
        x, y = batch(GPT2)
        for step in range(2):
            with waits() as found:
                tp.loss(mine(x), y, group).backward()
                if options:
                    sp.sum_gradients(mine, group)
                tp.clip_grad_norm_(mine, 1.0)
            if step:  # the first one makes connections
                assert not found, f"the host waits at {found}"


@on(1, 2, 4)
def gpt2():
    _step(GPT2)


@on(1, 2, 4)
def llama():
    _step(LLAMA)


def llama_in_bf16():
    _step(LLAMA, torch.bfloat16)


@on(1, 2, 4)
def along_sequence():
    _step(GPT2, edges=sp.ALONG_SEQUENCE)


def dropout():
    config = replace(GPT2, dropout=0.3)
    for way in ("equal", "own"):
        mine = tp.parallelize(model(config), world()[0], dropout=way)
        x, y = batch(config)
        tp.loss(mine(x), y, world()[0]).backward()


def from_nothing():
    with torch.device("meta"):
        mine = GPT(GPT2)
    mine = tp.parallelize(mine, world()[0])
    torch.manual_seed(0)
    tp.initialize(mine)
