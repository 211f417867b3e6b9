"""Tensor parallelism: loss, gradients, dropout, states."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.gpt.model import GPT

from .common import GPT2, batch, model, world


def dropout():
    config = replace(GPT2, dropout=0.3)
    for edges in (tp.REPLICATED, sp.SEQUENCE_SHARDED):
        mine = tp.parallelize(model(config), world()[0], edges)
        x, y = batch(config)
        tp.vocab_parallel_loss(mine(x), y, world()[0]).backward()


def from_nothing():
    with torch.device("meta"):
        mine = GPT(GPT2)
    mine = tp.parallelize(mine, world()[0])
    torch.manual_seed(0)
    tp.initialize_shards(mine)
