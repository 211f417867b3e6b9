"""DeepSpeed's engine, at each stage of ZeRO."""

from __future__ import annotations

from shardlab import deepspeed_engine as engines
from shardlab.layout import Layout

from .common import batch, local_batch, model, near, world


def _step(stage: int) -> None:
    _, _, size = world()
    engines.prepare()
    plain = model()
    settings = engines.config(Layout(size, zero=stage, micro_batch=4 // size))
    engine = engines.initialize(model(), settings)
    near(engines.weights(engine)["head.weight"], plain.head.weight.cpu(), 0.0)
    engines.step(engine, [tuple(map(local_batch, batch()))])


def stage_0():
    _step(0)


def stage_1():
    _step(1)


def stage_2():
    _step(2)


def stage_3():
    _step(3)
