"""One decision of all ranks on a step in `float16`."""

from __future__ import annotations

import torch

from shardlab.trainers.scaler import LossScaler

from .common import model, on, world


@on(2)
def scaler():
    group, rank, size = world()
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    kept = LossScaler(group=group)
    for parameter in one.parameters():
        parameter.grad = torch.ones_like(parameter)
        if rank == size - 1:
            parameter.grad.fill_(float("inf"))
    assert kept.unscale_gradients(optimizer) is False and kept.scale == 2.0**15
