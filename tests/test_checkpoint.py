"""Checkpoints: resumed equals unstopped, nothing is lost to a kill, damage is named."""

import copy
import errno
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from devices import to_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardlab import ranks
from shardlab.checkpoint import (
    MANIFEST,
    CheckpointError,
    Checkpoints,
    Training,
    best_interval,
    export_model,
    list_checkpoints,
    lost_fraction,
    named_tensors,
    simulated_lost_fraction,
)
from shardlab.checkpoint import folder as folders
from shardlab.common import text
from shardlab.data_parallel import DataParallel
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.zero import shard_module

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
BATCH = 8  # windows of a step, over all ranks


def run_on(fn, size, *args, device="auto", timeout=60):
    return ranks.run(fn, size, *args, device=device, timeout=timeout)


def shard_over_all(model):
    mesh = DeviceMesh.from_group(dist.group.WORLD, ranks.device().type)
    for part in (*getattr(model, "blocks", ()), model):
        fully_shard(part, mesh=mesh)


def build_run(kind="sharded", dtype=torch.float32, dropout=0.0, frozen=False):
    """Build a small GPT with AdamW and a schedule; `kind`: how ranks share the model."""
    torch.manual_seed(0)
    model = to_device(GPT(replace(PRESETS["nano"], dropout=dropout))).to(dtype)
    model.embedding.weight.requires_grad_(not frozen)
    if kind == "sharded":
        shard_over_all(model)
    if kind == "replicated":
        model = DataParallel(model, dist.group.WORLD)
    if kind == "torch's":
        model = nn.parallel.DistributedDataParallel(model)
    if kind.startswith("zero"):
        model = shard_module(model, dist.group.WORLD, int(kind[-1]))
    groups = [[p for n, p in model.named_parameters() if ("bias" in n) == b] for b in (0, 1)]
    biases = {"params": groups[1], "weight_decay": 0.0, "lr": 1e-2}
    optimizer = torch.optim.AdamW([{"params": groups[0]}, biases], lr=1e-3, foreach=False)
    # Steps 1, 3 and 4: one before the stop, two after it.
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 4], gamma=0.5)
    return Training(model, optimizer, schedule)


def train_steps(training, steps):
    """Train some steps on this rank's share of each batch; return the losses over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share, losses = BATCH // size, []
    for _ in range(steps):
        start = training.samples + rank * share
        tokens, targets = to_device(text.get_batch(32, share, start=start))
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


def copy_state(training):
    """Return unsharded copies of all tensors of a training run by name, and its plain values."""
    with named_tensors(training) as state:
        pairs = {
            **{f"model.{k}": v for k, v in state["model"].items()},
            **{f"{k}.{n}": v for k, of in state["optimizer"].items() for n, v in of.items()},
        }
        found = {
            name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
            for name, v in pairs.items()
        }
    return found, copy.deepcopy(training.get_non_tensor_state()), training.step, training.samples


def are_equal(a, b):
    return (
        a[0].keys() == b[0].keys()
        and all(torch.equal(a[0][name], b[0][name]) for name in a[0])
        and a[1:] == b[1:]
    )


# Resumed training equals unstopped training.


def train_and_save(root, kinds, how):
    """Return per kind of model: losses after a save, the saved state, the state at the end."""
    found = []
    for number, kind in enumerate(kinds):
        training = build_run(kind, frozen=number == 1, **how)
        with Checkpoints(root / f"{number}", dist.group.WORLD) as store:
            train_steps(training, 2)
            store.save(training, wait=number % 2 == 0)
            at_save = copy_state(training)
            losses = train_steps(training, 3)
        found.append((losses, at_save, copy_state(training)))
    return found


def load_and_train(root, kinds, how):
    found = []
    for number, kind in enumerate(kinds):
        torch.manual_seed(99)  # any state before the load, which the checkpoint replaces
        training = build_run(kind, frozen=number == 1, **how)
        torch.manual_seed(98)
        with Checkpoints(root / f"{number}", dist.group.WORLD) as store:
            store.load(training)
        loaded = copy_state(training)
        found.append((train_steps(training, 3), loaded, copy_state(training)))
    return found


def test_as_many_ranks_go_on_bit_for_bit_dropout_and_schedule_included(tmp_path):
    kinds = ["sharded", "zero 2", "replicated"]
    ways, how = (train_and_save, load_and_train), {"dropout": 0.1}
    before, after = (run_on(way, 2, tmp_path, kinds, how) for way in ways)
    for one, other in zip(before, after, strict=True):
        for (losses, at_save, end), (more, loaded, new_end) in zip(one, other, strict=True):
            assert are_equal(at_save, loaded)
            if ranks.choose_backend(2)[1] == "cpu":
                assert losses == more and are_equal(end, new_end)
            # A GPU's order varies: 4 sqrt(8 x 32 tokens) 2^-24 of 5.5, and a turned step's 2e-5.
            assert max(abs(a - b) for a, b in zip(losses, more, strict=True)) < 4.1e-5


def test_four_ranks_save_and_any_number_in_any_kind_of_model_goes_on(tmp_path):
    saved, double = ["sharded", "zero 1", "zero 2", "zero 3"], {"dtype": torch.float64}
    before = run_on(train_and_save, 4, tmp_path, saved, double)[0]
    others = {
        2: ["torch's", "zero 3", "replicated", "sharded"],
        1: ["plain", "sharded", "plain", "plain"],
    }
    for size, kinds in others.items():
        after = run_on(load_and_train, size, tmp_path, kinds, double)[0]
        for kind, one, other in zip(saved, before, after, strict=True):
            (losses, at_save, end), (more, loaded, new_end) = one, other
            assert sum("exp_avg" in name for name in at_save[0]) > 50
            assert are_equal(at_save, loaded), kind  # loaded state equals saved state bitwise
            # Other orders: 4 * 256 tokens * 2^-53 of 5.5; three steps, each 1e-2 / 1e-8 times a
            # gradient's error, 2 sqrt(256) 2^-53 of 0.1. A wrong state would show at 1e-4.
            assert max(abs(a - b) for a, b in zip(losses, more, strict=True)) < 1e-12, kind
            assert max((end[0][k] - new_end[0][k]).abs().max().item() for k in end[0]) < 1e-9


def build_with_groups(turned=False):
    """Return parameter groups: decay for matrices, none for the rest, at another learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "lr": 0.1, "weight_decay": 0.5}, {"params": rest, "lr": 0.001}]
    optimizer = torch.optim.AdamW(groups[::-1] if turned else groups, weight_decay=0.0)
    return Training(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))


def take_steps(training, count=2):
    for _ in range(count):
        training.optimizer.zero_grad()
        training.model(torch.ones(2, 6)).square().sum().backward()
        training.optimizer.step()
        if training.schedule:
            training.schedule.step()
        training.step += 1


def test_groups_keep_their_rates_and_in_another_order_they_are_refused(tmp_path):
    training = build_with_groups()
    take_steps(training)
    with Checkpoints(tmp_path) as store:
        store.save(training)
        store.load(again := build_with_groups())
        for each in (training, again):
            take_steps(each)
        assert are_equal(copy_state(training), copy_state(again))
        turned = build_with_groups(turned=True)
        before = copy_state(turned)
        with pytest.raises(CheckpointError, match="parameter groups differ"):
            store.load(turned)
        assert are_equal(before, copy_state(turned))


class Spare(nn.Module):
    """Model with a layer that no input reaches, like an expert without tokens."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x):
        return self.used(x)


def build_with_spare():
    torch.manual_seed(0)
    model = Spare()
    return Training(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def test_what_had_no_gradient_has_no_state_and_goes_on_without(tmp_path):
    for steps in (0, 2):
        training, again = build_with_spare(), build_with_spare()
        take_steps(training, steps)
        if not steps:
            take_steps(again, 1)  # its optimizer states are lost, too
        with Checkpoints(tmp_path / f"{steps}") as store:
            store.save(training, wait=steps > 0)
            store.wait()
            assert bool(training.optimizer.state) == bool(steps)  # torch's way leaves counters of 1
            store.load(again)
        for _ in range(2):
            assert are_equal(copy_state(training), copy_state(again)), steps
            take_steps(training, 3)
            take_steps(again, 3)
        assert are_equal(copy_state(training), copy_state(again)), steps


def test_an_asynchronous_save_holds_the_moment_of_its_call(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    class Held(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            begun.set()
            assert go_on.wait(20)
            return super().write_data(plan, planner)

    training = build_with_groups()
    take_steps(training)
    before = copy_state(training)
    with Checkpoints(tmp_path, writer=Held) as store:
        assert store.save(training, wait=False) is None
        assert begun.wait(20)
        take_steps(training)  # changes every tensor, before anything is written
        assert list_checkpoints(tmp_path) == []  # until then, the checkpoint does not count
        go_on.set()
        assert store.wait() == list_checkpoints(tmp_path)[-1]
        store.load(training)
    assert are_equal(before, copy_state(training))


def draw_after_load(root):
    """Draw random numbers twice after a load."""
    found = []
    with Checkpoints(root, dist.group.WORLD) as store:
        for _ in range(2):
            store.load(build_run("plain"))
            found.append(torch.rand(1).item())
    return found


def test_random_numbers_go_on_where_they_stopped_and_other_ranks_have_their_own(tmp_path):
    training = build_run("plain")
    with Checkpoints(tmp_path) as store:
        store.save(training)
        drawn = torch.rand(3).tolist(), random.random(), np.random.rand()
        store.load(training)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == drawn
    (first, again), (second, _) = run_on(draw_after_load, 2, tmp_path)
    assert first == again != second


# One file for a plain process.


def export_each_kind(path):
    found = {}
    for kind in ("sharded", "replicated", "torch's", "zero 3"):
        training = build_run(kind)
        train_steps(training, 1)
        export_model(training.model, path / kind, dist.group.WORLD)
        state = copy_state(training)[0]
        found[kind] = {n: state[f"model.{n}"] for n in GPT(PRESETS["nano"]).state_dict()}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if dist.get_rank() == 0:  # limits the size of files, like a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit))
    with pytest.raises(CheckpointError, match="sharded: not written: "):
        export_model(nn.Linear(500, 500), path / "sharded", dist.group.WORLD)
    return found


def test_a_plain_process_reads_the_exported_model_and_a_failed_export_leaves_it(tmp_path):
    found, _ = run_on(export_each_kind, 2, tmp_path)
    for kind, whole in found.items():
        model = GPT(PRESETS["nano"])
        model.load_state_dict(torch.load(tmp_path / kind, weights_only=True))
        for name, parameter in model.state_dict().items():
            assert torch.equal(parameter, whole[name]), (kind, name)
    assert sorted(os.listdir(tmp_path)) == sorted(found)


# Kills.


def build_small_run(value=0.0, sharded=False):
    """Return a training run with every tensor filled with `value`."""
    model = to_device(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    if sharded:
        shard_over_all(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(to_device(torch.ones(1, 64))).sum().backward()
    optimizer.step()
    training = Training(model, optimizer)
    fill_tensors(training, value)
    return training


@torch.no_grad()
def fill_tensors(training, value):
    training.step = int(value)
    for parameter in training.model.parameters():
        parameter.fill_(value)
        for tensor in training.optimizer.state[parameter].values():
            tensor.fill_(value)


def load_current_step(root):
    """Return the step of the current checkpoint, after checking that each one holds its step."""
    training, store = build_small_run(-1), Checkpoints(root)
    for step in (*store.list_steps(), None):  # None: the current one
        store.load(training, step)
        tensors = copy_state(training)[0].values()
        assert all((tensor == training.step).all() for tensor in tensors)
    return training.step


def save_until_killed(root, log, victims, delay):
    """Continue from the current checkpoint and save one step after another, until a kill."""
    training = build_small_run(-1, sharded=True)
    store = Checkpoints(root, dist.group.WORLD, keep=1)
    store.load(training)
    dist.barrier()
    if dist.get_rank() in victims:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(training.step + 1, training.step + 1000):
        fill_tensors(training, step)
        store.save(training, wait=step % 3 > 0)  # every third save is synchronous
        if step % 3 and dist.get_rank() == 0:
            with open(log, "a") as file:
                file.write(f"{step}\n")


def test_ten_kills_at_random_moments_lose_nothing(tmp_path):
    root, log = tmp_path / "run", tmp_path / "log"
    Checkpoints(root).save(build_small_run(1))
    log.write_text("1\n")
    dice = random.Random(7)
    left_over, before = 0, 1
    for number in range(10):
        victims = [(0,), (1,), (0, 1)][number % 3]
        # The loop does nothing but save, some 50 ms each on two cores: most kills meet a save. On a
        # CPU only: GPUs would take longer to start than to save.
        with pytest.raises(ranks.RankError, match="SIGKILL"):
            run_on(save_until_killed, 2, root, log, victims, dice.uniform(0, 0.4), device="cpu")
        promised = max(before, int(log.read_text().split()[-1]))
        before = load_current_step(root)
        # 3 may be complete when 2 was the last to be noted, for it is saved in the background; and
        # so may 4 when its rank died before it could note it.
        assert promised <= before <= promised + 2
        left_over += any(path.name.startswith(".saving") for path in root.iterdir())
    assert left_over >= 1  # of 10 kills: some hit a save
    with Checkpoints(root, keep=1) as store:
        store.save(build_small_run(load_current_step(root)))
    assert sorted(path.name[0] for path in root.iterdir()) == [".", "0"]  # .lock, one checkpoint


def test_a_kill_at_any_file_operation_of_a_save_loses_nothing(tmp_path):
    """Kill a save in one process at its first operation on a file, its second, …, its last."""
    Checkpoints(tmp_path / "first", keep=1).save(build_small_run(1))
    survived, number = False, 0
    steps, training = [], build_small_run(2)
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
        steps.append(load_current_step(root))
        if number % 8 == 0:  # the next save removes the leftovers, and works
            Checkpoints(root, keep=1).save(build_small_run(3))
            assert load_current_step(root) == 3 and len(list(root.iterdir())) == 2
        shutil.rmtree(root)
        number += 1
    # The old checkpoint up to some operation, then the new one; both occur often.
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


class Full(dcp.FileSystemWriter):
    """Writer whose disk is full at step 2, on rank 1."""

    def write_data(self, plan, planner):
        if dist.get_rank() == 1 and "step-2" in str(self.path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write_data(plan, planner)


def save_to_full_disk(root):
    """Return per way to wait every rank's error for a full disk on rank 1, and the files left."""
    folders.shutil.disk_usage = lambda _: SimpleNamespace(free=20_000)
    found = []
    for wait, writer in ((True, dcp.FileSystemWriter), (False, Full)):
        training = build_small_run(1, sharded=True)
        with Checkpoints(root / f"{wait}", dist.group.WORLD, writer=writer) as store:
            store.save(training)
            fill_tensors(training, 2)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            if dist.get_rank() == 1 and wait:  # limits the size of files
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
            with pytest.raises(CheckpointError) as caught:
                store.save(training, wait)
                store.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            dist.barrier()
            found.append((str(caught.value), sorted(os.listdir(store.root))))
            dist.barrier()
            fill_tensors(training, 3)
            store.save(training)
    return found


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_leaves_the_last_one(tmp_path):
    found = run_on(save_to_full_disk, 2, tmp_path)
    assert found[0] == found[1]
    for message, left in found[0]:
        assert "not saved: rank 1:" in message and ".saving-000002-step-2" in message
        assert left == [".lock", "000001-step-1"]
    # 4,680 weights, with two averages of each, and four counters
    assert "the disk is full: a save needs at least 56,176 bytes" in found[0][1][0]
    assert load_current_step(tmp_path / "True") == load_current_step(tmp_path / "False") == 3


def save_to_unshared_folder(root):
    if dist.get_rank() == 1:  # its files are on another disk, invisible to rank 0
        describe_file = folders.describe_file

        def describe_and_remove(path):
            found = describe_file(path)
            path.unlink()
            return found

        folders.describe_file = describe_and_remove
    store = Checkpoints(root, dist.group.WORLD)
    with pytest.raises(CheckpointError, match="rank 0 does not see __1_0.distcp, random-1.pt"):
        store.save(build_small_run(1, sharded=True))
    return sorted(os.listdir(root))


def test_a_folder_that_the_ranks_do_not_share(tmp_path):
    assert run_on(save_to_unshared_folder, 2, tmp_path) == [[".lock"]] * 2


# The current checkpoint, and the ones that are deleted.


def test_the_current_one_is_the_one_saved_last_and_keep_counts_them(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    training = build_small_run(100)
    for step in (100, 200, 300):
        fill_tensors(training, step)
        store.save(training)
    assert store.list_steps() == [200, 300]
    store.load(training, step=200)  # a user goes back, because the loss had exploded
    assert training.step == 200
    fill_tensors(training, 300.0)
    store.save(training)
    fill_tensors(training, 250)
    store.save(training)
    assert store.list_steps() == [300, 250] and load_current_step(tmp_path) == 250
    with pytest.raises(ValueError, match="step=200: must be one of the saved steps"):
        store.load(training, step=200)


def test_one_job_at_a_time_saves_into_a_folder_from_its_first_save_to_its_end(tmp_path):
    """A job locks the folder also between its saves; readers are allowed, a dead job unlocks."""
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    first.save(build_small_run(1))
    for wait in (True, False):
        with pytest.raises(ValueError, match=f"folder='{tmp_path}': must not be in use"):
            second.save(build_small_run(2), wait)
    assert load_current_step(tmp_path) == 1 and second.list_steps() == [1]
    first.save(build_small_run(3), wait=False)
    first.close()
    second.save(build_small_run(4))
    assert second.list_steps() == [3, 4]
    del second  # without a close, as after an error
    with Checkpoints(tmp_path) as third:
        third.save(build_small_run(7))
    assert load_current_step(tmp_path) == 7


def save_with_disagreement(root):
    """Return the error of a rank whose folder, step, position or optimizer differs."""
    mine, group, found = dist.get_rank() == 1, dist.group.WORLD, {}
    for what in ("folder", "keep", "step", "samples", "groups", "optimizer", "load"):
        try:
            keep = 3 if mine and what == "keep" else 2
            store = Checkpoints(root / "other" if mine and what == "folder" else root, group, keep)
            training = build_small_run(1)
            if mine and what == "groups":
                parts = [{"params": part.parameters()} for part in training.model]
                training.optimizer = torch.optim.AdamW(parts)
            if mine and what in ("step", "samples"):
                setattr(training, what, 4)
            if mine and what == "optimizer":
                training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)
            if what == "load":
                store.load(training, step=int(not mine))
            store.save(training)
        except ValueError as error:
            found[what] = str(error)
    return found, os.listdir(root)


def test_ranks_that_disagree_are_all_told_before_anything_is_written(tmp_path):
    (found, left), other = run_on(save_with_disagreement, 2, tmp_path)
    assert (found, left) == other and left == [] and len(found) == 7
    for what, message in found.items():
        assert message.startswith({"groups": "parameter groups", "load": "step"}.get(what, what))
        assert "rank 0 has" in message and "rank 1 has" in message


# Checkpoints that are damaged, foreign, or of another model.


def truncate_file(path):
    os.truncate(path, path.stat().st_size - 7)


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def forge_file(path, **changes):
    """Write a manifest with changed contents and a correct checksum."""
    manifest = json.loads(path.read_text()) | changes
    manifest.pop("crc32")
    path.write_text(json.dumps(manifest | {"crc32": folders.checksum_manifest(manifest)}))


DAMAGE = {
    "truncated shard": ("__0_0.distcp", truncate_file, r"has [\d,]+ bytes instead of [\d,]+"),
    "flipped bit": ("__1_0.distcp", flip_bit, r"its CRC-32 is \w{8} instead of \w{8}"),
    "no shard": ("__1_0.distcp", os.remove, "is missing"),
    "no manifest": (MANIFEST, os.remove, "is missing, so this is not a shardlab checkpoint"),
    "flipped manifest": (
        MANIFEST,
        lambda path: path.write_text(path.read_text().replace('"step": 1', '"step": 3')),
        "its checksum differs from its contents",
    ),
    "foreign": (MANIFEST, lambda p: forge_file(p, format="foreign"), "must be .*, not .'foreign'"),
}


def save_once(root):
    with Checkpoints(root, dist.group.WORLD) as store:
        store.save(build_small_run(1, sharded=True))


def load_and_expect_refusal(root, fresh):
    """Load on ranks that must refuse; return the message, and whether all state is unchanged."""
    training = build_small_run(5, sharded=True)
    if fresh:  # an optimizer that has made no step
        training.optimizer = torch.optim.AdamW(training.model.parameters())
    generators = torch.get_rng_state()
    before = copy_state(training)
    with Checkpoints(root, dist.group.WORLD) as store:
        try:
            store.load(training)
        except CheckpointError as error:
            message = str(error)
        untouched = are_equal(before, copy_state(training))
        untouched &= torch.equal(generators, torch.get_rng_state())
        return message, untouched and bool(training.optimizer.state) != fresh


def load_all_and_expect_refusal(root, names):
    return {name: load_and_expect_refusal(root / name, i % 2 > 0) for i, name in enumerate(names)}


def test_damage_is_named_on_every_rank_before_anything_is_touched(tmp_path):
    run_on(save_once, 2, tmp_path / "good")
    for name, (file, spoil, _) in DAMAGE.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        spoil(list_checkpoints(tmp_path / name)[-1] / file)
    for found in run_on(load_all_and_expect_refusal, 2, tmp_path, list(DAMAGE)):
        for name, (message, untouched) in found.items():
            file, _, words = DAMAGE[name]
            path = list_checkpoints(tmp_path / name)[-1] / file
            assert message.startswith(f"{path}: "), message
            with pytest.raises(AssertionError, match=words):
                raise AssertionError(message)
            assert untouched, name


def build_other(*sizes, make=torch.optim.AdamW, split=False):
    """Return a training run like the saved one, except for the arguments."""
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes or (64, 64, 8))]
    model = nn.Sequential(*layers)
    whole = [{"params": layer.parameters()} for layer in model] if split else model.parameters()
    return Training(model, make(whole))


def build_scheduled_run():
    training = build_other()
    training.schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    return training


OTHERS = {
    "0.weight is float32 [64, 64] in the checkpoint, float32 [6": lambda: build_other(64, 65, 8),
    "missing in the checkpoint: model.2.bias, model.2": lambda: build_other(64, 64, 8, 8),
    "only in the checkpoint: model.1.bias, model.1.weight, ": lambda: build_other(64, 64),
    "optimizer is AdamW in the checkpoint, SGD": lambda: build_other(make=torch.optim.SGD),
    "parameter groups differ": lambda: build_other(split=True),
    "schedule is None in the checkpoint, StepLR in this run": build_scheduled_run,
}


def test_another_model_or_optimizer_is_named_before_anything_is_touched(tmp_path):
    store = Checkpoints(tmp_path)
    path = store.save(build_small_run(1))
    for words, make in OTHERS.items():
        before = copy_state(training := make())
        with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
            store.load(training)
        assert str(path) in str(caught.value)
        assert are_equal(before, copy_state(training)) and not training.optimizer.state


def test_a_folder_without_a_complete_checkpoint(tmp_path):
    dcp.save({"x": torch.zeros(1)}, checkpoint_id=tmp_path / "epoch_3")  # DCP's, none of ours
    (tmp_path / ".saving-000001-step-1").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    store = Checkpoints(tmp_path)
    assert store.list_steps() == []
    with pytest.raises(CheckpointError, match="there is no complete checkpoint in this folder"):
        store.load(build_small_run())
    store.save(build_small_run(1))
    assert sorted(os.listdir(tmp_path)) == [".lock", "000001-step-1", "epoch_3", "notes.txt"]


class Trap:
    def __reduce__(self):
        return os.mkdir, (str(Trap.path),)


def test_a_pickle_with_code_in_it_is_not_run(tmp_path):
    Trap.path = tmp_path / "sprung"
    store = Checkpoints(tmp_path / "run")
    path = store.save(build_small_run(1)) / "rest.pt"
    torch.save(Trap(), path)
    files = json.loads((path.parent / MANIFEST).read_text())["files"]
    forge_file(path.parent / MANIFEST, files=files | {"rest.pt": folders.describe_file(path)})
    with pytest.raises(CheckpointError, match=r"rest\.pt: cannot be read: Weights only load"):
        store.load(build_small_run())
    assert not Trap.path.exists()


# Cost of checkpoints.


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
