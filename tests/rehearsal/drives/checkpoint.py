"""Checkpoints: saved, loaded, and the next step is the same; handed over to another layout."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from shardlab import ranks
from shardlab.checkpoint import (
    Checkpoints,
    Training,
    export_model,
    predict_transfer_bytes,
    transfer_weights,
)
from shardlab.data_parallel import DataParallel
from shardlab.gpt.model import GPT, loss
from shardlab.layout import Layout
from shardlab.measure import count
from shardlab.mesh import Parallel, create_groups, predict_pieces

from .common import GPT2, batch, folder, model, near, on, world

CONFIG = replace(GPT2, dropout=0.1)


def _make_training(kind: str) -> Training:
    group, _, size = world()
    module = model(CONFIG)
    if kind == "replicated":
        module = DataParallel(module, group)
    if kind == "sharded":
        mesh = dist.device_mesh.init_device_mesh(ranks.device().type, (size,))
        for one in module.blocks:
            fully_shard(one, mesh=mesh)
        fully_shard(module, mesh=mesh)
    return Training(module, torch.optim.AdamW(module.parameters(), lr=1e-3))


def _save_and_load(kind: str, wait: bool = True) -> None:
    group = world()[0]
    x, y = batch(CONFIG)
    with folder() as place:
        training = _make_training(kind)
        for _ in range(2):
            training.optimizer.zero_grad()
            loss(training.model(x), y).backward()
            training.optimizer.step()
            training.step += 1
        store = Checkpoints(place / "all", group)
        store.save(training, wait=wait)
        store.wait()
        training.optimizer.zero_grad()
        wanted = loss(training.model(x), y)
        wanted.backward()
        other = _make_training(kind)
        store.load(other)
        near(loss(other.model(x), y), wanted, 0.0)
        export_model(training.model, place / "weights.pt", group)


@on(1, 2, 4, daily=(2,))
def every_kind():
    _save_and_load("replicated")
    _save_and_load("sharded", wait=False)


def weights_for_a_machine_without_a_gpu():
    with folder() as place:
        export_model(model(GPT2), place / "weights.pt", world()[0])
        state = torch.load(place / "weights.pt", weights_only=True)
        devices = {str(t.device) for t in state.values()}
        assert devices == {"cpu"}, f"the file's weights are on {devices}"


def _make_parallel(layout: Layout, seed: int) -> Parallel:
    torch.manual_seed(seed)
    return Parallel(GPT(GPT2).to(ranks.device()), create_groups(layout, world()[0]), layout)


@on(2, 4, daily=(2,))
def handed_to_another_layout():
    group, rank, size = world()
    layouts = Layout(tp=size), Layout(dp=size, zero=1), Layout(pp=2, tp=size // 2, microbatches=2)
    for old, new in zip(layouts, layouts[1:], strict=False):
        source, target = _make_parallel(old, 0), _make_parallel(new, 1)
        with count.record_traffic() as sent:
            transfer_weights(source, target, group)
        for name, tensor in source.full_state_dict().items():
            assert torch.equal(tensor, target.full_state_dict()[name]), name
        parts = [[predict_pieces(GPT2, of, r) for r in range(size)] for of in (old, new)]
        assert sent.bytes == predict_transfer_bytes(*parts)[rank]
