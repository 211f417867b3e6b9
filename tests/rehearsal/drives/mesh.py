"""Several cuts at once: what a step sends and holds; for the rest see `contract`."""

from __future__ import annotations

import torch

from shardlab import mesh
from shardlab.layout import Layout
from shardlab.measure import count

from .common import LLAMA, batch, model, on, world


@on(1, 2, 4, daily=(4,))
def counted_and_held():
    group, _, size = world()
    tp = 2 if size == 4 else 1
    for zero in range(4):
        layout = Layout(dp=size // tp, tp=tp, zero=zero, sequence_parallel=tp > 1, microbatches=2)
        job = mesh.Parallel(model(LLAMA), mesh.join(layout, group), layout)
        optimizer = torch.optim.AdamW(job.parameters())
        x, y = (part.chunk(layout.dp)[job.groups.dp.rank()] for part in batch(LLAMA))
        with count.sent() as sent:
            job.step(x, y)
        mesh.counted(sent, job)
        optimizer.step()
        mesh.held(job, optimizer)
