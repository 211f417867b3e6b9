"""Three cuts at once: steps, the norm, whole weights, checkpoints, torch's mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardlab import mesh, ranks
from shardlab.checkpoint import Checkpoints, Training
from shardlab.layout import Layout
from shardlab.measure import count

from .common import GPT2, LLAMA, batch, folder, near, on, solution, twice, world


def _shape(**degrees: int) -> Layout:
    """A mesh with these degrees, if there are as many ranks; otherwise of copies alone."""
    shape, size = Layout(**degrees), world()[2]
    return shape if shape.ranks == size else Layout(dp=size)


def _job(shape: Layout, config: Any = GPT2, zero: int = 0, sequence: bool = False) -> Any:
    plain, mine = twice(config)
    m = 1 if shape.dp > 2 else 2
    layout = replace(shape, zero=zero, sequence_parallel=sequence, microbatches=m)
    return plain, mesh.Parallel(mine, mesh.join(layout, world()[0]), layout)


@on(1, 2, 4)
def a_checkpoint():
    config = replace(GPT2, tied=False)
    with folder() as path:
        states = []
        for number, shape in enumerate((_shape(pp=2, tp=2), Layout(dp=world()[2]))):
            _, job = _job(shape, config, zero=1)
            optimizer = torch.optim.AdamW(job.parameters(), foreach=False)
            training = Training(job, optimizer)
            with Checkpoints(path, world()[0]) as store:
                if number:
                    store.load(training)
                else:
                    x, y = (part.chunk(shape.dp)[job.groups.dp.rank()] for part in batch(config))
                    job.step(x, y)
                    optimizer.step()
                    store.save(training)
            states.append(job.full_state_dict())
        for name, tensor in states[0].items():
            assert torch.equal(tensor, states[1][name])


@on(1, 2, 4)
def torchs_mesh():
    shape = _shape(dp=2, tp=2)
    sizes = shape.dp, shape.pp, shape.tp
    theirs = init_device_mesh(ranks.device().type, sizes, mesh_dim_names=mesh.AXES)
    ours, groups = mesh.join(shape, world()[0]), mesh.groups_of(theirs)
    for a, b in zip(ours, groups, strict=True):
        assert dist.get_process_group_ranks(a) == dist.get_process_group_ranks(b)


@on(1, 2, 4)
def solution_of_the_norm():
    _, job = _job(_shape(pp=2, tp=2))
    x, y = (part.chunk(job.groups.dp.size())[job.groups.dp.rank()] for part in batch())
    job.step(x, y)
    gradients = {name: p.grad for name, p in job.named_parameters()}
    cut = {name for name, dimension in job.cuts.items() if dimension is not None}
    found = solution("mesh", "ex-mesh-norm")(gradients, cut, job.groups)
    near(found, job.clip_grad_norm_(1e9), 1e-4)


@on(1, 2, 4)
def counted_and_held():
    for zero in range(4):
        _, job = _job(shape := _shape(dp=2, tp=2), LLAMA, zero, sequence=True)
        optimizer = torch.optim.AdamW(job.parameters())
        x, y = (part.chunk(shape.dp)[job.groups.dp.rank()] for part in batch(LLAMA))
        with count.sent() as sent:
            job.step(x, y)
        mesh.counted(sent, job)
        optimizer.step()
        mesh.held(job, optimizer)
