"""Bytes held: the course's counter, compared with the pretended GPU's allocator."""

from __future__ import annotations

import torch
import torch.distributed as dist

import shardlab.measure.count.speed as speed
from shardlab import ranks
from shardlab.gpt.model import loss
from shardlab.measure import count

from .common import batch, model


def held_saved_and_sent():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    x, y = batch()
    for _ in range(2):
        with count.track_memory(module, optimizer, x, y) as held:
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
            assert (
                held.peak_bytes
                >= held.current_bytes
                >= sum(count.measure_state_bytes(module, optimizer).values())
            )
    with count.track_saved_activations(module, x) as saved:
        value = loss(module(x), y)
    assert saved.bytes > 0
    with count.record_traffic() as sent:
        dist.all_reduce(value.detach())
    assert sum(size for _, size in sent.collectives.values()) == 4


def rates():
    # The sizes of the pretended allocator are a GPU's.
    randn, zeros, seconds = torch.randn, torch.zeros, speed.measure_seconds
    torch.randn = lambda *_, **options: randn(64, 64, **options)
    torch.zeros = lambda *_, **options: zeros(64, **options)
    speed.measure_seconds = lambda *_, **__: 1.0
    try:
        speed.measure_rates(torch.float32, ranks.device())
    finally:
        torch.randn, torch.zeros, speed.measure_seconds = randn, zeros, seconds
