"""DeepSpeed's engine, at each stage of ZeRO."""

from __future__ import annotations

from shardlab import deepspeed_engine as engines
from shardlab.layout import Layout

from .common import batch, local_batch, model, near, world


def every_stage():
    _, _, size = world()
    engines.import_deepspeed()
    for stage in range(4):
        plain = model()
        settings = engines.build_config(Layout(size, zero=stage, micro_batch=4 // size))
        engine = engines.initialize(model(), settings)
        near(engines.gather_weights(engine)["head.weight"], plain.head.weight.cpu(), 0.0)
        engines.step(engine, [tuple(map(local_batch, batch()))])
