"""Every schedule of the pipeline."""

from __future__ import annotations

from dataclasses import replace

from shardlab import pipeline

from .common import GPT2, batch, model, on, world

CONFIG = replace(GPT2, layers=4)


@on(2)
def one_group_more_for_all_pipelines():
    group, _, size = world()
    plan = pipeline.make_schedule("1f1b", size, 4)
    stages = [pipeline.distribute_model(model(CONFIG), plan, group) for _ in range(2)]
    for stage in stages:
        stage.step(*batch(CONFIG))
    assert stages[0].mailbox.reverse_group is stages[1].mailbox.reverse_group is not group


def recorded():
    group, _, size = world()
    stage = pipeline.distribute_model(
        model(CONFIG), pipeline.make_schedule("1f1b", size, 4), group, record=True
    )
    stage.step(*batch(CONFIG))
    stage.gather_timeline()
