"""The training script: its versions and its strategies, beside one process on the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from shardlab.train import script
from shardlab.train.scaler import LossScaler

from .common import folder, model, on, world

SMALL = {"steps": 4, "every": 2, "limit": 64 * 35 + 1, "sample": 4}  # 2 steps an epoch


def _equal(step: str, **changes: Any) -> None:
    with folder() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = script.load("plain").main(folder=place / f"one-{dist.get_rank()}", **SMALL)
        found = script.load(step).main(folder=place / step, **SMALL | changes)
    assert max(abs(a - b) for a, b in zip(found, one, strict=True)) < 1e-4, (found, one)


def precision():
    _equal("precision", micro=4)


@on(1, 2, 4)
def resume():
    _equal("resume", micro=4)


def fsdp2():
    _equal("fsdp2", micro=4)


@on(1, 2, 4)
def taken_home():
    _equal("take_home", strategy="fsdp2", report=2, micro=4)


def taken_home_zero():
    _equal("take_home", strategy="zero3", report=2, micro=4)


def taken_home_tensor():
    _equal("take_home", strategy="tensor", tensor=2, report=2)


def scaler():
    group, rank, size = world()
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    kept = LossScaler(group=group)
    for parameter in one.parameters():
        parameter.grad = torch.ones_like(parameter)
        if rank == size - 1:
            parameter.grad.fill_(float("inf"))
    assert kept.unscale(optimizer) is False and kept.scale == 2.0**15
