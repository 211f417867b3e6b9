"""The training script: its versions and its strategies, compared with one CPU process."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from shardlab.gpt.model import GPT, PRESETS
from shardlab.train import core, one_gpu, take_home

from .common import folder, on

SMALL = {"steps": 4, "every": 2, "limit": 64 * 35 + 1}  # 2 steps an epoch


def _equal(**changes: Any) -> None:
    """Compare the lesson's script, or code/train.py with options, with one (see test_train)."""
    with folder() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = place / f"one-{dist.get_rank()}"
        one = one_gpu.main(folder=where, sample=4, **SMALL)
        if changes:
            options = take_home.Options(folder=str(place / "all"), **SMALL | changes)
            found = take_home.main(options, lambda _: GPT(PRESETS["nano"]))
        else:
            found = core.main(folder=place / "all", sample=4, **SMALL)
    assert max(abs(a - b) for a, b in zip(found, one, strict=True)) < 6.2e-5, (found, one)


@on(2)
def steps():
    _equal()


@on(1, 2, 4, daily=(2,))
def taken_home():
    _equal(strategy="fsdp2", report=2, micro=4)
