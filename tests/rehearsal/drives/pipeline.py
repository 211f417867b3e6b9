"""Every schedule of the pipeline."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F

from shardcourse.exercises import pipeline as checks
from shardlab import pipeline, ranks

from .common import GPT2, alike, batch, model, on, solution, twice, world

CONFIG = replace(GPT2, layers=4)


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


def recorded():
    group, _, size = world()
    stage = pipeline.distribute(
        model(CONFIG), pipeline.schedule("1f1b", size, 4), group, record=True
    )
    stage.step(*batch(CONFIG))
    stage.timeline()
