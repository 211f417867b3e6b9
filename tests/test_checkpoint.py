"""Checkpoints: resumed equals unstopped, nothing is lost to a kill, damage is named."""

import copy
import errno
import fcntl
import io
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from devices import here
from timed import on_time
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardlab import ranks, text
from shardlab.checkpoint import (
    MANIFEST,
    CheckpointError,
    Checkpoints,
    Training,
    best_interval,
    complete,
    export,
    lost_fraction,
    named_tensors,
    simulated_lost_fraction,
)
from shardlab.checkpoint import folder as folders
from shardlab.data_parallel import DataParallel
from shardlab.gemm import grid
from shardlab.model import GPT, PRESETS, loss
from shardlab.ranks import worker
from shardlab.zero import shard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
BATCH = 8  # windows of a step, over all ranks


def run(fn, size, *args, device="auto", timeout=60):
    return ranks.run(fn, size, *args, device=device, timeout=timeout)


def shard_over_all(model):
    mesh = DeviceMesh.from_group(dist.group.WORLD, ranks.device().type)
    for part in (*getattr(model, "blocks", ()), model):
        fully_shard(part, mesh=mesh)


def build(kind="sharded", dtype=torch.float32, dropout=0.0, group=None):
    """A small GPT with AdamW and a schedule; `kind` says how it is spread over the ranks."""
    torch.manual_seed(0)
    model = here(GPT(replace(PRESETS["nano"], dropout=dropout))).to(dtype)
    if kind == "sharded":
        shard_over_all(model)
    if kind == "replicated":
        model = DataParallel(model, group or dist.group.WORLD)
    if kind == "torch's":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Steps of 2, 4 and 8: some before the stop, some after it.
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 8], gamma=0.5)
    return Training(model, optimizer, schedule)


def train(training, steps):
    """Some steps on this rank's share of each batch; the losses over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share, losses = BATCH // size, []
    for _ in range(steps):
        tokens, targets = here(text.batch(32, share, start=training.samples + rank * share))
        training.optimizer.zero_grad()
        value = loss(training.model(tokens), targets)
        value.backward()
        training.optimizer.step()
        training.schedule.step()
        training.step += 1
        training.samples += BATCH
        mean = value.detach() / size
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def everything(training):
    """Whole copies of all tensors of a training run, by name, and its plain values."""
    with named_tensors(training) as state:
        pairs = {
            **{f"model.{k}": v for k, v in state["model"].items()},
            **{f"{k}.{n}": v for k, of in state["optimizer"].items() for n, v in of.items()},
        }
        found = {
            name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
            for name, v in pairs.items()
        }
    return found, copy.deepcopy(training.rest()), training.step, training.samples


def same(a, b):
    return (
        a[0].keys() == b[0].keys()
        and all(torch.equal(a[0][name], b[0][name]) for name in a[0])
        and a[1:] == b[1:]
    )


# Resumed equals unstopped.


def unstopped(root, kind, dtype, dropout, wait):
    training = build(kind, dtype, dropout)
    with Checkpoints(root, dist.group.WORLD) as store:
        train(training, 3)
        store.save(training, wait)
        at_save = everything(training)
        losses = train(training, 5)
    return losses, at_save, everything(training)


def resumed(root, kind, dtype, dropout):
    torch.manual_seed(99)  # whatever stood there before, the checkpoint decides
    training = build(kind, dtype, dropout)
    torch.manual_seed(98)
    with Checkpoints(root, dist.group.WORLD) as store:
        store.load(training)
    loaded = everything(training)
    return train(training, 5), loaded, everything(training)


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_as_many_ranks_go_on_bit_for_bit_dropout_and_schedule_included(tmp_path, kind, wait):
    args = (tmp_path, kind, torch.float32, 0.1)
    before = run(unstopped, 2, *args, wait)
    after = run(resumed, 2, *args)
    for (losses, at_save, end), (more, loaded, new_end) in zip(before, after, strict=True):
        assert same(at_save, loaded)
        if ranks.place(2)[1] == "cpu":
            assert losses == more and same(end, new_end)
        # A GPU's attention adds up in no fixed order. Other masks make 1e-2 of difference.
        assert max(abs(a - b) for a, b in zip(losses, more, strict=True)) < 1e-4


def test_four_ranks_save_and_two_and_one_go_on(tmp_path):
    args = (tmp_path, "sharded", torch.float64, 0.0)
    losses, at_save, end = run(unstopped, 4, *args, True)[0]
    for size, kind in ((4, "sharded"), (2, "sharded"), (1, "sharded"), (1, "plain")):
        for more, loaded, new_end in run(resumed, size, tmp_path, kind, *args[2:]):
            assert same(at_save, loaded)  # what is read is what was written, bit for bit
            # After that, fewer ranks add gradients up in another order: float64 rounds at 1e-16,
            # and AdamW divides by gradients of 1e-6 and more. A wrong state would show at 1e-4.
            assert max(abs(a - b) for a, b in zip(losses, more, strict=True)) < 1e-10
            gaps = [(end[0][k] - new_end[0][k]).abs().max().item() for k in end[0]]
            assert max(gaps) < 1e-9
            assert (losses == more) or size != 4


def uneven(root):
    torch.manual_seed(1)
    model = here(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)))  # 3 rows and 1 row, on 2 ranks
    model[0].bias.requires_grad_(False)
    shard_over_all(model)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(2):
        training.optimizer.zero_grad()
        model(here(torch.ones(2, 5))).sum().backward()
        training.optimizer.step()
    found = everything(training)
    with Checkpoints(root, dist.group.WORLD) as store:
        store.save(training)
    return found


def uneven_again(root):
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.1))
    Checkpoints(root).load(training)
    return everything(training)


def test_sizes_that_do_not_divide_a_frozen_layer_and_momentum(tmp_path):
    before = run(uneven, 2, tmp_path)[0]
    assert same(before, uneven_again(tmp_path))


def moves(root, kind):
    training = build(kind)
    train(training, 2)
    with Checkpoints(root, dist.group.WORLD) as store:
        store.save(training)
        found = everything(training)
        for other in ("sharded", "replicated", "torch's", "plain"):
            there = build(other)
            store.load(there)
            assert same(found, everything(there)), (kind, other)
    return True


@pytest.mark.parametrize("kind", ["sharded", "replicated", "torch's", "plain"])
def test_every_kind_of_model_reads_what_every_other_kind_wrote(tmp_path, kind):
    size = 1 if kind == "plain" else 2  # plain ones on two ranks would drift apart
    assert run(moves, size, tmp_path, kind) == [True] * size


def in_groups(turned=False, schedule=True):
    """Decay for matrices, none for the rest, at another rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "lr": 0.1, "weight_decay": 0.5}, {"params": rest, "lr": 0.001}]
    optimizer = torch.optim.AdamW(groups[::-1] if turned else groups, weight_decay=0.0)
    made = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if schedule else None
    return Training(model, optimizer, made)


def some_steps(training, count=2):
    for _ in range(count):
        training.optimizer.zero_grad()
        training.model(torch.ones(2, 6)).square().sum().backward()
        training.optimizer.step()
        if training.schedule:
            training.schedule.step()
        training.step += 1


@pytest.mark.parametrize("schedule", [False, True])
def test_groups_keep_their_rates_and_in_another_order_they_are_refused(tmp_path, schedule):
    training = in_groups(schedule=schedule)
    some_steps(training)
    Checkpoints(tmp_path).save(training)
    again = in_groups(schedule=schedule)
    Checkpoints(tmp_path).load(again)
    some_steps(training)
    some_steps(again)
    assert same(everything(training), everything(again))
    turned = in_groups(turned=True, schedule=schedule)
    before = everything(turned)
    with pytest.raises(CheckpointError, match="parameter group 0 of this .* is group 1 of the ch"):
        Checkpoints(tmp_path).load(turned)
    assert same(before, everything(turned))
    part = turned.optimizer.param_groups[0]["params"].pop()
    turned.optimizer.param_groups[1]["params"].append(part)
    with pytest.raises(CheckpointError, match="group 0 of this training is no group of the ch"):
        Checkpoints(tmp_path).load(turned)


class Spare(nn.Module):
    """With a layer that no input reaches, as an expert may be that gets no token."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x):
        return self.used(x)


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "nadam": torch.optim.NAdam,  # these three begin with averages or counters that are not 0
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
}


def with_spare(make, named=False):
    torch.manual_seed(0)
    model = Spare()
    parameters = model.named_parameters() if named else model.parameters()
    return Training(model, make(parameters, lr=0.01))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_what_had_no_gradient_has_no_state_and_goes_on_without(tmp_path, name, steps):
    training = with_spare(OPTIMIZERS[name])
    some_steps(training, steps)
    with Checkpoints(tmp_path) as store:
        store.save(training)
        again = with_spare(OPTIMIZERS[name])
        if not steps:
            some_steps(again, 1)  # what has stepped forgets it
        store.load(again)
    assert same(everything(training), everything(again))
    some_steps(training, 3)
    some_steps(again, 3)
    assert same(everything(training), everything(again))


def test_an_optimizer_that_knows_names_and_one_of_another_model(tmp_path):
    training = with_spare(torch.optim.AdamW, named=True)
    some_steps(training)
    with Checkpoints(tmp_path) as store:
        store.save(training)
        store.load(again := with_spare(torch.optim.AdamW, named=True))
        assert same(everything(training), everything(again))
        store.load(again := with_spare(torch.optim.AdamW))
        assert "param_names" not in again.optimizer.param_groups[0]
        again.model = Spare()
        for call in (store.save, store.load):
            with pytest.raises(ValueError, match="optimizer=AdamW: it trains what is no parameter"):
                call(again)


def of_zero(stage, frozen):
    """A small GPT that ZeRO shards, its biases in a group of their own."""
    torch.manual_seed(0)
    model = here(GPT(PRESETS["nano"])).double()
    if frozen:
        model.embedding.weight.requires_grad_(False)
    model = shard(model, dist.group.WORLD, stage) if stage else model
    groups = [[p for n, p in model.named_parameters() if ("bias" in n) == b] for b in (0, 1)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "lr": 1e-3}, {"params": groups[1], "lr": 1e-2}], foreach=False
    )
    return Training(model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 8]))


def whole(training):
    """Whole weights; all tensors that a checkpoint would have."""
    model = training.model
    weights = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return {k: v.clone() for k, v in weights.items()}, everything(training)


def zero_saves(root, stage, wait, frozen):
    training = of_zero(stage, frozen)
    train(training, 3)
    with Checkpoints(root, dist.group.WORLD) as store:
        store.save(training, wait)
        saved = whole(training)
        return train(training, 3), saved, whole(training)


def zero_goes_on(root, stage, frozen):
    training = of_zero(stage, frozen)
    with Checkpoints(root, dist.group.WORLD) as store:
        store.load(training)
    loaded = whole(training)
    return train(training, 3), loaded, whole(training)


@pytest.mark.parametrize(
    ("stage", "wait", "frozen"), [(1, True, True), (2, False, False), (3, True, False)]
)
def test_a_model_of_zero_alone_goes_on_in_any_stage_on_any_ranks(tmp_path, stage, wait, frozen):
    losses, saved, end = run(zero_saves, 4, tmp_path, stage, wait, frozen)[0]
    assert sum("exp_avg" in name for name in saved[1][0]) > 50
    for other, size in ((stage, 4), (stage % 3 + 1, 2), (0, 1)):
        more, loaded, new_end = run(zero_goes_on, size, tmp_path, other, frozen)[0]
        assert same(loaded[1], saved[1])
        assert all(torch.equal(loaded[0][name], saved[0][name]) for name in saved[0])
        if (other, size) == (stage, 4):
            assert more == losses and same(new_end[1], end[1])
        # As above: another order of sums in float64.
        assert max(abs(a - b) for a, b in zip(losses, more, strict=True)) < 1e-10


def few_elements(root):
    """Three elements on four ranks: the last has nothing, and its optimizer never steps."""
    torch.manual_seed(0)
    model = shard(here(nn.Linear(2, 1)), dist.group.WORLD, 3)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False))
    with Checkpoints(root, dist.group.WORLD) as store:
        if store.steps():
            store.load(training)
            return everything(training)
        store.save(training)
        assert not training.optimizer.state
        for _ in range(3):
            training.optimizer.zero_grad()
            model(here(torch.ones(1, 2))).sum().backward()
            training.optimizer.step()
        store.save(training)
        found = everything(training)
        store.load(training)
        assert same(found, everything(training))
        return found


def test_a_rank_of_zero_without_an_element_does_not_hide_the_others_counters(tmp_path):
    found = run(few_elements, 4, tmp_path)
    assert found[3][0]["bias.step"].item() == found[0][0]["weight.step"].item() == 3
    assert all(same(found[0], each) for each in found + run(few_elements, 2, tmp_path))


def tuned(kind, turned=False):
    """A model of transformers in two groups, with dropout, tied weights and a schedule."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    model = here(transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **ends))).train()
    if kind == "sharded":
        mesh = DeviceMesh.from_group(dist.group.WORLD, ranks.device().type)
        for part in (*model.transformer.h, model):
            fully_shard(part, mesh=mesh)
    if kind == "torch's":
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "zero":
        model = shard(model, dist.group.WORLD, 3, units=list(model.transformer.h))
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0, "lr": 1e-3}]
    for name, parameter in model.named_parameters():
        groups["bias" in name or "ln_" in name]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups[::-1] if turned else groups, lr=1e-2, foreach=False)
    return Training(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))


def tune(training, steps):
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(training.step)
        tokens = here(torch.randint(64, (4, 16), generator=generator))
        tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        training.optimizer.zero_grad()
        value = training.model(input_ids=tokens, labels=tokens).loss
        value.backward()
        training.optimizer.step()
        training.schedule.step()
        training.step += 1
        losses.append(value.item())
    return losses


def tuned_and_resumed(root, kind):
    training = tuned(kind)
    tune(training, 3)
    with Checkpoints(root, dist.group.WORLD) as store:
        store.save(training)
        losses, end = tune(training, 3), everything(training)
        store.load(again := tuned(kind))
        assert tune(again, 3) == losses and same(end, everything(again))
        for other in ("sharded", "torch's", "zero"):
            store.load(again := tuned(other))
            assert [g["weight_decay"] for g in again.optimizer.param_groups] == [0.1, 0.0]
            with pytest.raises(
                CheckpointError, match="parameter group 0 of this training is group"
            ):
                store.load(tuned(other, turned=True))
    return True


@pytest.mark.parametrize("kind", ["sharded", "torch's", "zero"])
def test_a_model_of_transformers_with_two_groups_goes_on_bit_for_bit(tmp_path, kind):
    assert run(tuned_and_resumed, 2, tmp_path, kind, device="cpu") == [True, True]


def test_saving_before_the_first_step_changes_nothing_and_loads_as_nothing(tmp_path):
    def losses(training, steps=4):
        found = []
        for step in range(steps):
            training.optimizer.zero_grad()
            value = loss(training.model(text.batch(32, 2, start=step)[0]), text.batch(32, 2)[1])
            value.backward()
            training.optimizer.step()
            found.append(value.item())
        return found

    untouched = losses(build("plain"))
    for wait in (True, False):
        training = build("plain")
        store = Checkpoints(tmp_path)
        store.save(training, wait)
        assert not training.optimizer.state  # torch's own way leaves counters of 1 behind
        store.wait()
        assert losses(training) == untouched
        again = build("plain")
        store.load(again)
        assert losses(again) == untouched


def test_an_asynchronous_save_holds_the_moment_of_its_call(tmp_path):
    training = Training(net := nn.Linear(300, 300), torch.optim.AdamW(net.parameters()))
    net(torch.ones(1, 300)).sum().backward()
    training.optimizer.step()
    training.schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 10)
    begun = threading.Event()
    go_on = threading.Event()

    class Held(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            begun.set()
            assert go_on.wait(20)
            return super().write_data(plan, planner)

    store = Checkpoints(tmp_path, writer=Held)
    training.step = 7
    before = everything(training)
    assert store.save(training, wait=False) is None
    assert begun.wait(20)
    with torch.no_grad():  # all that can change, before anything of it is written
        for parameter in net.parameters():
            parameter.fill_(0.5)
        for state in training.optimizer.state.values():
            state["exp_avg"].fill_(3)
            state["step"].fill_(3)
    training.optimizer.param_groups[0]["lr"] = 7.0
    training.schedule.last_epoch = 70
    training.step = 8
    assert complete(tmp_path) == []  # and until then, it does not count
    go_on.set()
    assert store.wait() == complete(tmp_path)[-1]
    store.load(training)
    after = everything(training)
    assert same(before, after)
    store.close()


def test_random_numbers_go_on_where_they_stopped(tmp_path):
    training = build("plain")
    store = Checkpoints(tmp_path)
    store.save(training)
    drawn = torch.rand(3).tolist(), random.random(), np.random.rand()
    store.load(training)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == drawn


def draw(root):
    training = build("plain")
    with Checkpoints(root, dist.group.WORLD) as store:
        store.load(training)
    return torch.rand(1).item()


def test_with_another_number_of_ranks_each_has_random_numbers_of_its_own(tmp_path):
    Checkpoints(tmp_path).save(build("plain"))
    drawn = run(draw, 2, tmp_path)
    assert drawn[0] != drawn[1]
    assert drawn == run(draw, 2, tmp_path)


# One file for a plain process.


def exported(path, kind):
    training = build(kind)
    train(training, 1)
    export(training.model, path, dist.group.WORLD)
    return everything(training)[0]


@pytest.mark.parametrize("kind", ["sharded", "replicated", "torch's"])
def test_a_plain_process_reads_the_exported_model_with_weights_only(tmp_path, kind):
    whole = run(exported, 2, tmp_path / "model.pt", kind)[0]
    model = GPT(PRESETS["nano"])
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, whole[f"model.{name}"])
    assert os.listdir(tmp_path) == ["model.pt"]


def zero_exported(path):
    model = shard(here(GPT(PRESETS["nano"])), dist.group.WORLD, 3)
    export(model, path, dist.group.WORLD)
    return model.full_state_dict()


def test_our_own_zero_is_exported(tmp_path):
    whole = run(zero_exported, 2, tmp_path / "model.pt")[0]
    read = torch.load(tmp_path / "model.pt", weights_only=True)
    assert read.keys() == whole.keys() == GPT(PRESETS["nano"]).state_dict().keys()
    assert all(torch.equal(read[name], whole[name]) for name in whole)
    assert os.listdir(tmp_path) == ["model.pt"]


def into_a_full_disk(path):
    model = nn.Linear(500, 500)  # a megabyte
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit))
    with pytest.raises(CheckpointError, match=r"model\.pt: not written: OSError.*File too large"):
        export(model, path, dist.group.WORLD)
    return True


def test_an_export_that_fails_says_so_on_every_rank_and_leaves_what_was_there(tmp_path):
    (tmp_path / "model.pt").write_text("from before")
    assert run(into_a_full_disk, 2, tmp_path / "model.pt") == [True, True]
    assert (tmp_path / "model.pt").read_text() == "from before"
    assert os.listdir(tmp_path) == ["model.pt"]


def test_export_replaces_no_pipe_and_no_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="path='.*': this is no plain file"):
            export(nn.Linear(1, 1), path)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("name", ["", "no such folder/model.pt"])
def test_export_refuses_what_is_no_file_name(tmp_path, name):
    with pytest.raises(ValueError, match="path='"):
        export(nn.Linear(1, 1), tmp_path / name)
    assert os.listdir(tmp_path) == []


# Killed.


def small(value=0.0, mesh=None, sharded=False):
    """A training run whose every tensor is filled with `value`."""
    model = here(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    if sharded:
        shard_over_all(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(here(torch.ones(1, 64))).sum().backward()
    optimizer.step()
    training = Training(model, optimizer)
    fill(training, value)
    return training


@torch.no_grad()
def fill(training, value):
    training.step = int(value)
    for parameter in training.model.parameters():
        parameter.fill_(value)
        for tensor in training.optimizer.state[parameter].values():
            tensor.fill_(value)


def read(root):
    """The step of the current checkpoint, all of which is checked to be of that step."""
    training = small(-1)
    Checkpoints(root).load(training)
    tensors = everything(training)[0].values()
    assert all((tensor == training.step).all() for tensor in tensors)
    return training.step


def life(root, log, victims, delay):
    """Go on from the current checkpoint and save one step after another, until a kill."""
    training = small(-1, sharded=True)
    store = Checkpoints(root, dist.group.WORLD, keep=1)
    store.load(training)
    dist.barrier()
    if dist.get_rank() in victims:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(training.step + 1, training.step + 1000):
        fill(training, step)
        store.save(training, wait=step % 3 > 0)  # every third one in the background
        if step % 3 and dist.get_rank() == 0:
            with open(log, "a") as file:
                file.write(f"{step}\n")


def test_twenty_kills_at_random_moments_lose_nothing(tmp_path):
    root, log = tmp_path / "run", tmp_path / "log"
    Checkpoints(root).save(small(1))
    log.write_text("1\n")
    dice = random.Random(7)
    left_over, before = 0, 1
    for number in range(20):
        victims = [(0,), (1,), (0, 1)][number % 3]
        # The loop does nothing but save, some 50 ms each on two cores: most kills meet a save. On a
        # CPU: GPUs would take longer to start than to save.
        with pytest.raises(ranks.RankError, match="SIGKILL"):
            run(life, 2, root, log, victims, dice.uniform(0, 0.4), device="cpu")
        promised = max(before, int(log.read_text().split()[-1]))
        before = read(root)
        # 3 may be complete when 2 was the last to be noted, for it is saved in the background; and
        # so may 4 when its rank died before it could note it.
        assert promised <= before <= promised + 2
        left_over += any(path.name.startswith(".saving") for path in root.iterdir())
    assert left_over >= 2  # of 20: they did meet saves
    with Checkpoints(root, keep=1) as store:
        store.save(small(read(root)))
    assert sorted(path.name[0] for path in root.iterdir()) == [".", "0"]  # .lock, one checkpoint


def test_a_kill_at_any_file_operation_of_a_save_loses_nothing(tmp_path):
    """A save in one process is killed at its first operation on a file, its second, …, its last."""
    Checkpoints(tmp_path / "first", keep=1).save(small(1))
    survived, number = False, 0
    steps, training = [], small(2)
    while not survived:
        root = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "first", root)
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)
            _kill_at(root, number)
            Checkpoints(root, keep=1).save(training)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        survived = status == 0
        assert survived or os.WTERMSIG(status) == signal.SIGKILL
        steps.append(read(root))
        Checkpoints(root, keep=1).save(small(3))  # the next save clears up, and works
        assert read(root) == 3 and len(list(root.iterdir())) == 2
        shutil.rmtree(root)
        number += 1
    # The old one up to some operation, the new one from there on; and there are many of either.
    assert steps == sorted(steps) and steps.count(1) > 10 and steps.count(2) > 3


def _kill_at(root, number):
    events = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
    left = [number]

    def watch(event, args):
        if event in events and str(root) in str(args[0]):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(watch)


def fails_on_rank_1(root, wait):
    training = small(1, sharded=True)
    store = Checkpoints(root, dist.group.WORLD)
    store.save(training)
    fill(training, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 1:  # no file may grow beyond this: a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        store.save(training, wait)
        store.wait()
        message = ""
    except CheckpointError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    left = sorted(os.listdir(root))
    dist.barrier()
    fill(training, 3)
    store.save(training)
    store.close()
    return message, left


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_leaves_the_last_one(tmp_path, wait):
    found = run(fails_on_rank_1, 2, tmp_path, wait)
    assert found[0] == found[1]
    message, left = found[0]
    assert "not saved: rank 1:" in message and ".saving-000002-step-2" in message
    assert left == [".lock", "000001-step-1"]
    assert read(tmp_path) == 3


def fills_up(root, wait):
    """Saves onto a disk that a second checkpoint does not fit on, then makes room."""
    training = small(1, sharded=True)
    with Checkpoints(root, dist.group.WORLD, keep=1) as store:
        store.save(training)
        room = shutil.disk_usage(root).free
        dist.barrier()
        if dist.get_rank() == 0:
            (root / "full").write_bytes(bytes(room - 30_000))
        dist.barrier()
        fill(training, 2)
        with pytest.raises(CheckpointError) as caught:
            store.save(training, wait)
            store.wait()
        dist.barrier()
        left = sorted(os.listdir(root))
        dist.barrier()
        if dist.get_rank() == 0:
            (root / "full").unlink()
        dist.barrier()
        store.save(training)
    return str(caught.value), left


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted, which root alone may do")
@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_is_called_full_with_the_bytes_that_it_takes(tmp_path, wait):
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        found = run(fills_up, 2, tmp_path, wait)
        assert found[0] == found[1]
        message, left = found[0]
        # 4,680 weights, with two averages of each, and four counters
        assert f"{tmp_path}/.saving-000002-step-2: not saved: " in message
        assert "the disk is full: 56,176 bytes and more" in message and "are free" in message
        assert "unexpected pos" not in message
        assert left == [".lock", "000001-step-1", "full"]
        assert read(tmp_path) == 2
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def not_shared(root):
    if dist.get_rank() == 1:  # its files are on a disk of its own: rank 0 does not see them
        describe = folders.describe

        def alone(path):
            found = describe(path)
            path.unlink()
            return found

        folders.describe = alone
    with Checkpoints(root, dist.group.WORLD) as store:
        with pytest.raises(CheckpointError, match="rank 0 does not see __1_0.distcp, random-1.pt"):
            store.save(small(1, sharded=True))
        return store.steps()


def refusing(code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    return flock


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_can_be_saved_into(tmp_path, monkeypatch, code):
    monkeypatch.setattr(fcntl, "flock", refusing(code))
    with Checkpoints(tmp_path) as store:
        with pytest.warns(UserWarning, match="no locks"):
            store.save(small(1))
        store.save(small(2))
    monkeypatch.undo()
    assert read(tmp_path) == 2


def test_who_saves_is_told_why_it_cannot_be_locked(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as store:
        for code in (errno.EIO, errno.EROFS):
            monkeypatch.setattr(fcntl, "flock", refusing(code))
            with pytest.raises(CheckpointError, match=os.strerror(code)):
                store.save(small(1))
        monkeypatch.setattr(fcntl, "flock", refusing(errno.EWOULDBLOCK))
        with pytest.raises(ValueError, match="folder=.* writes into it"):
            store.save(small(1))
        monkeypatch.undo()
        (tmp_path / ".saving-000001-step-1").write_text("a file where a folder was")
        with pytest.raises(CheckpointError, match="NotADirectoryError"):
            store.save(small(1))
        (tmp_path / ".saving-000001-step-1").unlink()
        (tmp_path / ".lock").unlink()
        store.close()
    os.mkfifo(tmp_path / ".lock")  # to open a pipe is to wait for whoever reads from it
    with Checkpoints(tmp_path) as store:
        with pytest.raises(CheckpointError, match="no plain file"):
            store.save(small(1))
        (tmp_path / ".lock").unlink()
        store.save(small(1))
    assert read(tmp_path) == 1


HALF_AN_HOUR = 1800  # seconds: gloo's own limit, where nobody names another


def limit_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def limits(root):
    """Of the groups that are made of a group of ours, and of one that a script made."""
    found = []
    with Checkpoints(root, dist.group.WORLD) as store:
        found.append(limit_of(store.members.group) <= limit_of(dist.group.WORLD) < HALF_AN_HOUR)
    made = grid(dist.group.WORLD, 1, 1)
    for group in (made.row_group, made.column_group):
        found.append(limit_of(group) <= limit_of(dist.group.WORLD) < HALF_AN_HOUR)
    dist.destroy_process_group()
    worker._inside = None
    place = {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", timeout=timedelta(seconds=77), **place)
    with Checkpoints(root, dist.group.WORLD) as store:
        return [*found, limit_of(store.members.group) == 77]


def test_groups_of_ours_wait_as_long_as_the_run_does(tmp_path):
    assert run(limits, 1, tmp_path) == [[True] * 4]


def left_alone(root):
    if dist.get_rank() == 1:
        Checkpoints(root, dist.group.WORLD, timeout=1.0)
        while not (root / "told").exists():
            time.sleep(0.05)
        return True
    store = Checkpoints(root, dist.group.WORLD, timeout=1.0)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="[Tt]imed out"):
        store.save(small(1))
    seconds = time.monotonic() - begin
    (root / "told").touch()
    return 0.5 < seconds < 30  # the run's own limit is a minute


def test_an_orphan_does_not_wait_longer_than_it_was_told(tmp_path):
    assert run(left_alone, 2, tmp_path) == [True, True]


def test_a_folder_that_the_ranks_do_not_share(tmp_path):
    assert run(not_shared, 2, tmp_path) == [[], []]
    assert os.listdir(tmp_path) == [".lock"]


# Which one is current, and which ones go.


def test_the_current_one_is_the_one_saved_last_and_keep_counts_them(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    training = small(100)
    for step in (100, 200, 300):
        fill(training, step)
        store.save(training)
    assert store.steps() == [200, 300]
    store.load(training, step=200)  # somebody goes back, because the loss had exploded
    assert training.step == 200
    fill(training, 300.0)
    store.save(training)
    fill(training, 250)
    store.save(training)
    assert store.steps() == [300, 250] and read(tmp_path) == 250
    with pytest.raises(ValueError, match="step=200: allowed are 300, 250"):
        store.load(training, step=200)


def test_one_job_at_a_time_saves_into_a_folder_from_its_first_save_to_its_end(tmp_path):
    """Also between its saves; who only reads is let in, and a job that dies lets go."""
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    assert second.steps() == []
    first.save(small(1))
    for wait in (True, False):
        with pytest.raises(ValueError, match=f"folder='{tmp_path}': .*process {os.getpid()} on"):
            second.save(small(2), wait)
    assert read(tmp_path) == 1 and second.steps() == [1]
    first.save(small(3), wait=False)
    first.close()
    second.save(small(4))
    assert second.steps() == [3, 4]
    (writes_too := Checkpoints(tmp_path)).close()
    with pytest.raises(ValueError, match="writes into it"):
        writes_too.save(small(5))
    del second  # without a close, as an error may leave it
    with Checkpoints(tmp_path) as third:
        third.save(small(5))
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path) as fourth:
        fourth.save(small(6), wait=False)
        raise ZeroDivisionError
    fourth._thread.shutdown()
    with Checkpoints(tmp_path) as fifth:
        fifth.save(small(7))
    assert read(tmp_path) == 7


JOB = """
import sys, torch
from shardlab.checkpoint import Checkpoints, Training
model = torch.nn.Linear(1, 1)
store = Checkpoints(sys.argv[1])
store.save(Training(model, torch.optim.SGD(model.parameters(), lr=1.0), step=1))
print("saved", flush=True)
input()
"""


def test_another_job_that_lives_keeps_this_one_out_until_it_is_killed(tmp_path):
    line = [sys.executable, "-c", JOB, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen(line, **pipes)
    try:
        assert other.stdout.readline() == "saved\n"
        store = Checkpoints(tmp_path)
        with pytest.raises(ValueError, match=f"process {other.pid} on"):
            store.save(small(2))
        assert store.steps() == [1]
    finally:
        other.kill()
        other.wait()
    store.save(small(2))
    assert store.steps() == [1, 2]


def disagrees(root, what):
    """What a rank hears that has another folder, step, position or optimizer than the others."""
    mine, group = dist.get_rank() == 1, dist.group.WORLD
    try:
        keep = 3 if mine and what == "keep" else 2
        store = Checkpoints(root / "other" if mine and what == "folder" else root, group, keep)
        training = small(1)
        if mine and what == "groups":
            parts = [{"params": part.parameters()} for part in training.model]
            training.optimizer = torch.optim.AdamW(parts)
        if mine and what in ("step", "samples"):
            setattr(training, what, 4)
        if mine and what == "optimizer":
            training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)
        if what == "load":
            store.save(training)
            store.load(training, step=int(not mine))
        store.save(training)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("what", ["folder", "keep", "step", "samples", "groups", "optimizer"])
def test_ranks_that_disagree_are_all_told_before_anything_is_written(tmp_path, what):
    found = run(disagrees, 2, tmp_path, what)
    assert found[0] == found[1] and "rank 0 has" in found[0] and "rank 1 has" in found[0]
    assert found[0].startswith("parameter groups" if what == "groups" else f"{what}: ")
    assert os.listdir(tmp_path) == []


def test_ranks_that_load_different_steps_are_told(tmp_path):
    found = run(disagrees, 2, tmp_path, "load")
    assert found == ["step: rank 0 has 1, rank 1 has 0; allowed is the same on all ranks"] * 2


# Damaged, foreign, or of another model.


def truncate(path):
    os.truncate(path, path.stat().st_size - 7)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def into_folder(path):
    path.unlink()
    path.mkdir()


def into_pipe(path):
    path.unlink()
    os.mkfifo(path)


def swap(path):
    """Files of two ranks, each in the other's place."""
    other = path.with_name("__0_0.distcp")
    path.rename(path.with_name("aside"))
    other.rename(path)
    path.with_name("aside").rename(other)


def into_link(path):
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def named(name):
    return {name: {"bytes": 1, "crc32": 0}}


def forge(path, leave=None, **changes):
    """A manifest that says something else, and whose checksum fits."""
    manifest = json.loads(path.read_text()) | changes
    if leave:
        del manifest["files"][leave]
    manifest = {k: v for k, v in manifest.items() if v is not None and k != "crc32"}
    path.write_text(json.dumps(manifest | {"crc32": folders.checksum_of(manifest)}))


DAMAGE = {
    "truncated shard": ("__0_0.distcp", truncate, r"has [\d,]+ bytes instead of [\d,]+"),
    "flipped bit": ("__1_0.distcp", flip, r"its CRC-32 is \w{8} instead of \w{8}"),
    "no shard": ("__1_0.distcp", os.remove, "is missing"),
    "flipped index": (".metadata", flip, "its CRC-32 is"),
    "no index": (".metadata", os.remove, "is missing"),
    "flipped random state": ("random-1.pt", flip, "its CRC-32 is"),
    "no manifest": (MANIFEST, os.remove, "there is no manifest, so this is no checkpoint of ours"),
    "half a manifest": (MANIFEST, truncate, "damaged, not JSON any more"),
    "flipped manifest": (
        MANIFEST,
        lambda path: path.write_text(path.read_text().replace('"step": 1', '"step": 3')),
        "its own checksum does not fit",
    ),
    "not text": (MANIFEST, lambda path: path.write_bytes(b"\xff\xfe\x00"), "not JSON any more"),
    "foreign": (MANIFEST, lambda p: edit(p, format="deepspeed"), "format is 'deepspeed', allowed"),
    "a list": (MANIFEST, lambda path: path.write_text("[1]"), r"format is \[1\], allowed is"),
    "of the future": (MANIFEST, lambda p: edit(p, version=9), "version is 9, this code reads 2"),
    "manifest a folder": (MANIFEST, into_folder, "cannot be read: no plain file"),
    "manifest a pipe": (MANIFEST, into_pipe, "cannot be read: no plain file"),
    "manifest elsewhere": (MANIFEST, into_link, "cannot be read: no plain file"),
    "shard a folder": ("__1_0.distcp", into_folder, "cannot be read: no plain file"),
    "shard a pipe": ("__1_0.distcp", into_pipe, "cannot be read: no plain file"),
    "shard elsewhere": ("__1_0.distcp", into_link, "cannot be read: no plain file"),
    "rest a pipe": ("rest.pt", into_pipe, "cannot be read: no plain file"),
    "swapped": ("__1_0.distcp", swap, "its CRC-32 is|bytes instead of"),
    "not listed": (MANIFEST, lambda p: forge(p, leave="rest.pt"), "'rest.pt' is missing, which"),
    "without end": (MANIFEST, lambda p: forge(p, ranks=10**12), "'random-2.pt' is missing, which"),
    "another step": (MANIFEST, lambda p: forge(p, step=3), "is of step 3, and not of the step"),
    "no groups": (MANIFEST, lambda p: forge(p, **{"parameter groups": 1}), "allowed are lists of"),
    "nested": (MANIFEST, lambda p: p.write_text("[" * 100_000), "not JSON any more"),
    "no files": (MANIFEST, lambda p: forge(p, files=None), "files is None, allowed are names"),
    "no tensors": (MANIFEST, lambda p: forge(p, tensors=[]), r"tensors is \[\], allowed are names"),
    "no step": (MANIFEST, lambda p: forge(p, step=None), "step=None: allowed are whole"),
    "half a sample": (MANIFEST, lambda p: forge(p, samples=0.5), "samples=0.5: allowed are"),
    "no ranks": (MANIFEST, lambda p: forge(p, ranks=0), "ranks=0: allowed are whole numbers, 1"),
    "no size": (MANIFEST, lambda p: forge(p, files={"x": {"crc32": 0}}), "files: 'x' is {'crc32'"),
    "no shape": (MANIFEST, lambda p: forge(p, tensors={"x": 3}), "tensors: 'x' is 3, allowed is"),
    "out of here": (MANIFEST, lambda p: forge(p, files=named("../x")), "'../x' is none in this"),
    "at the root": (MANIFEST, lambda p: forge(p, files=named("/x")), "'/x' is none in this"),
    "up": (MANIFEST, lambda p: forge(p, files=named("..")), r"files: '\.\.' is none in"),
}


def saves(root):
    with Checkpoints(root, dist.group.WORLD) as store:
        store.save(small(1, sharded=True))


def refuses(root, fresh):
    """Load on ranks that must refuse: the message, and whether all is as it was."""
    training = small(5, sharded=True)
    if fresh:  # an optimizer that has not made a step
        training.optimizer = torch.optim.AdamW(training.model.parameters())
    generators = torch.get_rng_state()
    before = everything(training)
    with Checkpoints(root, dist.group.WORLD) as store:
        try:
            store.load(training)
        except CheckpointError as error:
            message = str(error)
        untouched = same(before, everything(training))
        untouched &= torch.equal(generators, torch.get_rng_state())
        return message, untouched and bool(training.optimizer.state) != fresh


def all_refuse(root, names):
    return {name: refuses(root / name, i % 2 > 0) for i, name in enumerate(names)}


def test_damage_is_named_on_every_rank_before_anything_is_touched(tmp_path):
    run(saves, 2, tmp_path / "good")
    for name, (file, spoil, _) in DAMAGE.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        spoil(complete(tmp_path / name)[-1] / file)
    for found in run(all_refuse, 2, tmp_path, list(DAMAGE)):
        for name, (message, untouched) in found.items():
            file, _, words = DAMAGE[name]
            path = complete(tmp_path / name)[-1] / file
            assert message.startswith(f"{path}: "), message
            with pytest.raises(AssertionError, match=words):
                raise AssertionError(message)
            assert untouched, name


def test_what_is_no_training_run_is_named(tmp_path):
    good = small(1)
    nothing = {"model": None, "optimizer": None}
    with Checkpoints(tmp_path) as store:
        for call in (store.save, store.load):
            for name in nothing:
                with pytest.raises(ValueError, match=f"{name}=None: allowed"):
                    call(replace(good, **{name: None}))
            with pytest.raises(ValueError, match="training=None: allowed is a"):
                call(None)
        for step in (True, "1", 1.0, -1):
            with pytest.raises(ValueError, match=f"step={step!r}: allowed are"):
                store.save(good) and store.load(good, step)
    with pytest.raises(ValueError, match="folder=None: allowed are"):
        Checkpoints(None)
    for model, group in ((None, None), (good.model, "world")):
        with pytest.raises(ValueError, match="=.*: allowed is a"):
            export(model, tmp_path / "whole.pt", group)
    for bad in (0, "1", float("nan"), True, None):
        with pytest.raises(ValueError, match="timeout=|allowed are numbers above 0"):
            Checkpoints(tmp_path, timeout=bad) and best_interval(bad, 1)
    for bad in (-1, "1", float("nan"), True):
        with pytest.raises(ValueError, match="restart=.*: allowed are numbers from 0"):
            lost_fraction(1, 1, 1, bad)


def test_dcp_alone_loads_a_flipped_bit_without_a_word(tmp_path):
    """Why there are checksums: this is not about our code."""
    tensor = torch.zeros(1000)
    dcp.save({"x": tensor}, checkpoint_id=tmp_path)
    path = tmp_path / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(bytes(3000)) + 2000] ^= 64
    path.write_bytes(content)
    loaded = {"x": torch.ones(1000)}
    try:
        dcp.load(loaded, checkpoint_id=tmp_path)
    except BaseException as error:  # torch may learn to notice, and then the lesson is to say so
        pytest.fail(f"DCP noticed: {error}")
    assert not torch.equal(loaded["x"], tensor)


def drifted(root):
    training = small(dist.get_rank() + 1)  # step 1 on rank 0, step 2 on rank 1
    training.step = 7
    with Checkpoints(root, dist.group.WORLD) as store:
        store.save(training)


def test_of_replicas_that_have_drifted_apart_some_rank_s_are_kept_without_a_word(tmp_path):
    """As the lesson says of DCP: this is not about our code."""
    run(drifted, 2, tmp_path)
    training = small()
    Checkpoints(tmp_path).load(training)
    kept = {p.detach().unique().item() for p in training.model.parameters()}
    assert kept and kept <= {1.0, 2.0}


def wider():
    model = nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 8))
    return Training(model, torch.optim.AdamW(model.parameters()))


def longer():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(8, 8), nn.ReLU())
    return Training(model, torch.optim.AdamW(model.parameters()))


def shorter():
    model = nn.Sequential(nn.Linear(64, 64))
    return Training(model, torch.optim.AdamW(model.parameters()))


def as_saved():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))


def half():
    model = as_saved().to(torch.bfloat16)
    return Training(model, torch.optim.AdamW(model.parameters()))


def with_(make, schedule=False):
    model = as_saved()
    optimizer = make(model)
    made = torch.optim.lr_scheduler.StepLR(optimizer, 1) if schedule else None
    return Training(model, optimizer, made)


OTHERS = {
    "wider": (
        wider,
        r"model\.0\.weight is float32 \[64, 64\] in the checkpoint, float32 \[65, 64\] in this",
    ),
    "longer": (longer, r"missing in the checkpoint: model\.2\.bias, model\.2\.weight$"),
    "shorter": (
        shorter,
        r"in the checkpoint alone: model\.1\.bias, model\.1\.weight, .* and 5 more",
    ),
    "half": (half, r"model\.0\.bias is float32 \[64\] in the checkpoint, bfloat16 \[64\] in this"),
    "sgd": (
        lambda: with_(lambda m: torch.optim.SGD(m.parameters())),
        "optimizer is AdamW in the checkpoint, SGD in this training",
    ),
    "groups": (
        lambda: with_(lambda m: torch.optim.AdamW([{"params": x.parameters()} for x in m])),
        "parameter groups is 1 in the checkpoint, 2 in this training",
    ),
    "amsgrad": (
        lambda: with_(lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True)),
        "missing in the checkpoint: optimizer.0.bias.max_exp_avg_sq",
    ),
    "schedule": (
        lambda: with_(lambda m: torch.optim.AdamW(m.parameters()), True),
        "schedule is None in the checkpoint, StepLR in this training",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_or_optimizer_is_named_before_anything_is_touched(tmp_path, name):
    make, words = OTHERS[name]
    Checkpoints(tmp_path).save(small(1))
    training = make()
    before = everything(training)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoints(tmp_path).load(training)
    assert str(complete(tmp_path)[-1]) in str(caught.value)
    assert same(before, everything(training)) and not training.optimizer.state


def test_a_folder_with_another_step_s_name(tmp_path):
    Checkpoints(tmp_path).save(small(1))
    complete(tmp_path)[-1].rename(tmp_path / "000001-step-900")
    with pytest.raises(CheckpointError, match="step-900/manifest.json: is of step 1, and not"):
        Checkpoints(tmp_path).load(small(), step=900)


def test_steps_are_numbers_and_no_texts(tmp_path):
    store, training = Checkpoints(tmp_path), small()
    for step in (999_900, 1_000_000):
        training.step = step
        path = store.save(training)
    path.rename(tmp_path / "1000000-step-1000000")  # the millionth save
    assert store.steps() == [999_900, 1_000_000]
    store.load(again := small())
    assert again.step == 1_000_000


def test_a_folder_without_a_complete_checkpoint(tmp_path):
    dcp.save({"x": torch.zeros(1)}, checkpoint_id=tmp_path / "epoch_3")  # DCP's, none of ours
    (tmp_path / ".saving-000001-step-1").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    store = Checkpoints(tmp_path)
    assert store.steps() == []
    with pytest.raises(CheckpointError, match="there is no complete checkpoint in it"):
        store.load(small())
    store.save(small(1))
    assert sorted(os.listdir(tmp_path)) == [".lock", "000001-step-1", "epoch_3", "notes.txt"]


class Trap:
    def __reduce__(self):
        return os.mkdir, (str(Trap.path),)


def test_a_pickle_with_code_in_it_is_not_run(tmp_path):
    Trap.path = tmp_path / "sprung"
    store = Checkpoints(tmp_path / "run")
    path = store.save(small(1)) / "rest.pt"
    buffer = io.BytesIO()
    torch.save(Trap(), buffer)
    path.write_bytes(buffer.getvalue())
    manifest = json.loads((path.parent / MANIFEST).read_text())  # a forger fits the checksums
    manifest["files"]["rest.pt"] = folders.describe(path)
    del manifest["crc32"]
    edit(path.parent / MANIFEST, **manifest, crc32=folders.checksum_of(manifest))
    with pytest.raises(CheckpointError, match=r"rest\.pt: cannot be read: Weights only load"):
        store.load(small())
    assert not Trap.path.exists()


# Bad input.


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, None])
def test_keep_is_a_number_of_one_or_more(tmp_path, keep):
    with pytest.raises(ValueError, match=f"keep={keep!r}: allowed are whole numbers, 1 or more"):
        Checkpoints(tmp_path / "run", keep=keep)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["step", "samples"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "7", None])
def test_steps_and_samples_are_numbers_of_zero_or_more(tmp_path, name, value):
    training = small()
    setattr(training, name, value)
    with pytest.raises(ValueError, match=f"{name}={value!r}: allowed are whole numbers, 0 or more"):
        Checkpoints(tmp_path / "run").save(training)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_a_file_and_a_group_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file': this is a file; allowed is a folder"):
        Checkpoints(tmp_path / "file")
    with pytest.raises(ValueError, match="group='all': allowed are None or a group"):
        Checkpoints(tmp_path / "run", group="all")
    assert os.listdir(tmp_path) == ["file"]


def test_a_schedule_that_no_plain_file_can_hold(tmp_path):
    training = small()
    training.schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    training.schedule.mine = Trap()
    with pytest.raises(ValueError, match="optimizer and schedule: allowed are plain values"):
        Checkpoints(tmp_path / "run").save(training)
    assert os.listdir(tmp_path) == []


# What it costs.


def test_the_formulas():
    # 120 s to save and one failure in 24 hours: sqrt(2 * 120 * 86,400) s.
    assert best_interval(120, 86_400) == pytest.approx(4553.7, abs=0.1)
    # For rare failures, the textbook's sum: save / interval + half an interval / mtbf.
    assert lost_fraction(4553.7, 120, 86_400) == pytest.approx(
        120 / 4553.7 + 4553.7 / 2 / 86_400, 0.05
    )
    for interval in (10.0, 60.0, 300.0):
        want = lost_fraction(interval, 5, 400, 20)
        # 20,000 failures: a relative error of about 1 % of the time that is not lost.
        assert simulated_lost_fraction(interval, 5, 400, 20) == pytest.approx(want, abs=0.01)
    best = best_interval(5, 4000)
    assert lost_fraction(best, 5, 4000) < min(lost_fraction(best * f, 5, 4000) for f in (0.7, 1.4))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "1", True])
def test_the_formulas_refuse(value):
    with pytest.raises(ValueError, match="save=.*: allowed are numbers above 0"):
        best_interval(value, 1)
    with pytest.raises(ValueError, match="mtbf=.*: allowed are numbers above 0"):
        lost_fraction(1, 1, value)
    with pytest.raises(ValueError, match="restart=-1: allowed are"):
        lost_fraction(1, 1, 1, -1)


def held_up(root, pause):
    """Seconds that a save takes from training, at once and in the background."""

    class Slow(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            time.sleep(pause)  # a storage that takes its time
            return super().write_data(plan, planner)

    training = build()
    train(training, 1)
    found = []
    with Checkpoints(root, dist.group.WORLD, writer=Slow) as store:
        for wait in (True, False):
            dist.barrier()
            begin = time.perf_counter()
            store.save(training, wait)
            found.append(time.perf_counter() - begin)
        train(training, 1)
        assert store.wait()
    return found


@pytest.mark.alone
def test_an_asynchronous_save_holds_training_up_for_less(tmp_path):
    for at_once, background in run(held_up, 2, tmp_path, 1.0):
        # The storage alone takes a second. The rest, copying 3 MB included, is some 0.1 s here;
        # a machine five times slower would still pass.
        with on_time():
            assert at_once > 1.0 and background < 0.5 * at_once


def in_parts(root):
    """Two pairs of ranks, each with checkpoints of its own, made and closed more than once."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    found = []
    for step in (1, 2):
        with Checkpoints(root / f"{mine}", pairs[mine]) as store:
            store.save(small(step + 10 * mine))
        dist.barrier()
        with Checkpoints(root / f"{1 - mine}", pairs[mine]) as store:
            found.append(store.load(training := small())["step"])
            assert training.step == found[-1]
    return found


def test_groups_that_are_parts_of_the_world(tmp_path):
    assert run(in_parts, 4, tmp_path) == [[11, 12]] * 2 + [[1, 2]] * 2
