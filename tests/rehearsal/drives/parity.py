"""A parallel program on GPUs, compared with a plain one; and one that nobody averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardlab import data_parallel as dp
from shardlab import ranks
from shardlab.gpt.model import loss
from shardtools.parity.programs import judged, matched, recorded

from .common import GPT2, batch, model, on, world


def _program(average: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """A step of a share of the batch; without `average`, of all of it."""

    def program(watch: Any) -> None:
        _, rank, size = world()
        share = slice(rank, None, size) if average else slice(None)
        net = model(GPT2)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)
        watch(net, optimizer)
        x, y = batch(GPT2)
        loss(net(x[share]), y[share]).backward()
        if average:
            average(net)
        optimizer.step()
        assert next(net.parameters()).device == ranks.device()

    return program


@on(1, 2, daily=(2,))
def copies():
    group, _, size = world()
    record = recorded(_program(None), 1)
    assert all(part.value.device.type == "cpu" for each in record.parts.values() for part in each)
    for average, equal in ((lambda net: dp.average_gradients(net, group), True), (_nobody, False)):
        every: list[Any] = [None] * size
        dist.all_gather_object(every, matched(_program(average), record))
        report = judged(record, every)
        assert report.equal == equal == ("nobody averaged" not in str(report)), report


def _nobody(net: Any) -> None:
    pass
