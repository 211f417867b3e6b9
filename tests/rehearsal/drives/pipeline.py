"""Every schedule of the pipeline."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardlab import pipeline, ranks
from shardlab.check import pipeline as checks
from shardlab.model import loss

from .common import GPT2, alike, batch, near, on, solution, twice, waits, world

CONFIG = replace(GPT2, layers=4)


def _step(name: str, config: Any = CONFIG, record: bool = True, **options: Any) -> None:
    plain, mine = twice(config)
    group, _, size = world()
    x, y = batch(config)
    plan = pipeline.schedule(name, size, 4)
    stage = pipeline.distribute(mine, plan, group, record=record, **options)
    value = stage.step(x, y)
    whole = loss(plain(x), y)
    whole.backward()
    if value is not None:
        near(value, whole)
    if record:
        stage.timeline()
    state = stage.full_state_dict()
    if dist.get_rank() == 0:
        assert set(state) >= {name for name, _ in plain.named_parameters()}


@on(2)  # on a GPU that is shared, messages pass through the host
def hot_path():
    for name in ("1f1b", "zb-h1"):
        group, _, size = world()
        stage = pipeline.distribute(twice(CONFIG)[1], pipeline.schedule(name, size, 4), group)
        x, y = batch(CONFIG)
        for step in range(2):
            with waits() as found:
                stage.step(x, y)
            if step:  # the first one makes connections
                assert not found, f"the host waits at {found}"


def naive_and_gpipe():
    _step("naive")
    _step("gpipe", record=False)


@on(1, 2, 4)
def one_forward_one_backward():
    _step("1f1b")
    _step("1f1b", recompute=True)


@on(1, 2, 4)
def tied():
    _step("1f1b", replace(CONFIG, tied=True))


@on(1, 2, 4)
def untied():
    _step("1f1b", replace(CONFIG, tied=False))


def zero_bubble():
    _step("zb-h1")


def interleaved():
    _step("interleaved", replace(CONFIG, layers=8))


def zero_bubble_v():
    _step("zb-v", replace(CONFIG, layers=8))


@on(2)
def one_group_more_for_all_pipelines():
    group, _, size = world()
    plan = pipeline.schedule("1f1b", size, 4)
    stages = [pipeline.distribute(twice(CONFIG)[1], plan, group) for _ in range(2)]
    for stage in stages:
        stage.step(*batch(CONFIG))
    assert stages[0].mail.back is stages[1].mail.back is not group


@on(1, 2, 4)
def solution_of_1f1b():
    _, rank, size = world()
    torch.manual_seed(0)
    parts = [torch.nn.Linear(4, 4).to(ranks.device()) for _ in range(size)]
    x, y = torch.randn(2, 8, 4, device=ranks.device())
    whole = torch.nn.Sequential(*copy.deepcopy(parts))
    F.mse_loss(whole(x), y).backward()
    calls = checks._send, checks._receive
    solution("pipeline", "ex-pipeline-1f1b", F=F)(parts[rank], x, y, 4, rank, size, *calls)
    alike(parts[rank], whole[rank])
