"""Loss scaling: as torch's, equal on all ranks. Lightning: in a real Slurm, on two nodes."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardlab import ranks, zero
from shardlab.common import text
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.trainers.scaler import LossScaler
from shardtools.cluster import slurm

EVENTS = {"good": 1.0, "inf": math.inf, "minus": -math.inf, "nan": math.nan}


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.sampled_from(sorted(EVENTS)), min_size=1, max_size=12),
    where=st.integers(0, 5),
    power=st.integers(-4, 30),
    interval=st.integers(1, 4),
)
def test_it_is_torchs_scaler(events, where, power, interval):
    ours, theirs = (torch.nn.Linear(2, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    unused = torch.nn.Parameter(torch.ones(2))  # has no gradient
    makers = [torch.optim.AdamW([*m.parameters(), unused], lr=0.1) for m in (ours, theirs)]
    mine = LossScaler(2.0**power, interval)
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=interval)
    for number, event in enumerate(events):
        data = torch.full((4, 2), 1.0 + number)
        for module, scaled in ((ours, mine.scale_loss), (theirs, torchs.scale)):
            module.zero_grad()
            scaled(module(data).square().mean()).backward()
            module.weight.grad.view(-1)[where] *= EVENTS[event]
        if stepped := mine.unscale_gradients(makers[0]):
            makers[0].step()
        torchs.step(makers[1])
        torchs.update()
        assert stepped == (event == "good")
        assert mine.scale == torchs.get_scale()
        assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)


def run_on(fn, *args, timeout=60.0):
    return ranks.run(fn, 2, *args, device="cpu", timeout=timeout)


def train_each(wrapper: str, kinds: tuple[str, ...], steps: int):
    """Return the results of `trained` by kind and rank: one run of ranks for all kinds."""
    found = run_on(lambda: [train_in_fp16(wrapper, kind, steps) for kind in kinds])
    return zip(*found, strict=True)


def train_in_fp16(wrapper: str, kind: str, steps: int):
    """Return all ranks' losses, scales (doubled every 3 steps) and weights of a GPT in float16."""
    torch.manual_seed(0)
    model, rank = GPT(PRESETS["nano"]), dist.get_rank()
    if wrapper == "fsdp2":
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        for part in [*model.blocks, model]:
            fully_shard(part, mesh=mesh)
    elif wrapper == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        model = zero.shard_module(model, dist.group.WORLD, stage=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = LossScaler(2.0**16, 3, dist.group.WORLD if kind == "together" else None)
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    losses, scales = [], []
    for step in range(steps):
        tokens, targets = text.get_batch(32, 2, start=4 * step + 2 * rank)
        with torch.autocast("cpu", torch.float16):
            value = loss(model(tokens), targets)
        optimizer.zero_grad()
        if kind == "torch":
            torchs.scale(value).backward()
            torchs.step(optimizer)
            torchs.update()
        else:
            scaler.scale_loss(value).backward()
            if scaler.unscale_gradients(optimizer):
                optimizer.step()
        scales.append(torchs.get_scale() if kind == "torch" else scaler.scale)
        mean = value.detach() / 2
        dist.all_reduce(mean)
        losses.append(mean.item())
    weights = [
        p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for p in model.parameters()
    ]
    return losses, scales, weights


def test_with_ddp_the_sum_tells_all_ranks():
    alone, (torchs, _) = train_each("ddp", ("alone", "torch"), 10)
    (losses, scales, weights), (_, others, _) = alone
    assert scales == others and max(scales) > 2**16 and scales[-1] < max(scales)  # up, then down
    assert (losses, scales) == torchs[:2]
    assert all(map(torch.equal, weights, torchs[2]))


def test_with_shards_one_all_reduce_decides():
    together, (torchs, _), alone = train_each("fsdp2", ("together", "torch", "alone"), 12)
    (losses, scales, weights), (_, others, _) = together
    assert scales == others == torchs[1] and losses == torchs[0]
    assert all(map(torch.equal, weights, torchs[2]))
    (bad, first, _), (_, second, _) = alone
    assert max(first[-1], second[-1]) > 64 * min(first[-1], second[-1])
    assert bad[-1] > losses[-1] + 0.1


def test_alone_with_zero_the_ranks_part_ways():
    """A rank that skips a step sends no new weights, and the others wait for them."""
    with pytest.raises(ranks.RankError, match="mismatched collectives"):
        run_on(train_in_fp16, "zero2", "alone", 12, timeout=6)
    (_, scales, _), (_, others, _) = run_on(train_in_fp16, "zero2", "together", 6)
    assert scales == others


def scale_after_overflow(*kinds):
    """Return a rank's scale after one step in which a gradient shard of rank 1 overflows."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [kind])) for kind in kinds
    ]
    for parameter in parameters:
        mine = torch.ones_like(parameter.to_local())
        if dist.get_rank() == 1 and isinstance(parameter.placements[0], Shard):
            mine[0, 0] = math.inf
        parameter.grad = DTensor.from_local(mine, mesh, parameter.placements, run_check=False)
    scaler = LossScaler(1024.0, group=dist.group.WORLD)
    scaler.unscale_gradients(torch.optim.SGD(parameters, lr=0.1))
    return scaler.scale


def test_a_replicated_gradient_that_comes_first_hides_no_overflow():
    """With torch's scaler it hides the overflow: the lesson shows it."""
    orders = (Shard(0), Replicate()), (Replicate(), Shard(0))
    assert run_on(lambda: [scale_after_overflow(*kinds) for kinds in orders]) == [[512, 512]] * 2


def test_bad_input_of_lightning_is_named():
    pytest.importorskip("pytorch_lightning")
    from shardlab.trainers import existing_ranks

    with pytest.raises(ValueError, match="strategy='fsdp'"):
        existing_ranks.fit_on_ranks("fsdp", 1)


@pytest.fixture
def start_at(monkeypatch):
    """Start the script with Lightning in a process of its own; return the step where it begins."""
    L = pytest.importorskip("pytorch_lightning")
    from shardlab.trainers import core

    class Look(L.Callback):
        def on_train_start(self, trainer, module):
            self.begun = trainer.global_step

    def start(folder, *options):
        look = Look()

        def main():
            monkeypatch.setattr(core, "SynchronizedSave", lambda: look)
            core.main()
            return look.begun

        given = ["core", "--folder", str(folder), "--limit", "4097", *options]
        monkeypatch.setattr("sys.argv", given)
        return ranks.run(main, 1, device="cpu", show=False, timeout=120)[0]

    return start


def test_a_start_goes_on_from_the_newest_checkpoint(start_at, tmp_path):
    assert start_at(tmp_path / "own", "--steps=2", "--every=1") == 0
    assert start_at(tmp_path / "other", "--steps=3", "--every=1") == 0
    # Lightning saves at SIGUSR1, a step after the last validation.
    shutil.move(tmp_path / "other/last.ckpt", tmp_path / "own/hpc_ckpt_1.ckpt")
    assert start_at(tmp_path / "own", "--steps=4", "--every=1") == 3
    assert start_at(tmp_path / "own", "--steps=5", "--every=1") == 4  # from the validation since


def test_ranks_save_after_the_same_step_whenever_the_signal_comes():
    pytest.importorskip("pytorch_lightning")
    from shardlab.trainers import core, existing_ranks

    class Signals(core.SynchronizedSave):
        """Stand-in for Lightning's signal handler, which saves under Slurm: it records the step."""

        def on_train_start(self, trainer, module):
            self.saved = []
            signal.signal(signal.SIGUSR1, lambda *_: self.saved.append(trainer.global_step))
            super().on_train_start(trainer, module)

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == (7 if dist.get_rank() else 12):
                os.kill(os.getpid(), signal.SIGUSR1)
            super().on_train_batch_end(trainer)

    def save_checkpoint():
        signals = Signals()
        existing_ranks.fit_on_ranks("ddp", 22, extra_callbacks=[signals])
        return signals.saved

    assert run_on(save_checkpoint) == [[10, 20], [10, 20]]


@pytest.mark.skipif(bool(slurm.find_missing()), reason=f"Slurm is not installed: {slurm.INSTALL}")
def test_lightning_on_two_nodes_saves_is_requeued_and_goes_on(tmp_path, request):
    pytest.importorskip("pytorch_lightning")
    if not request.config.getoption("--weekly"):
        pytest.skip("four imports of Lightning, twice")
    code = Path(__file__).resolve().parents[1] / "code"
    shutil.copy(code / "shardlab/trainers/lightning.sbatch", tmp_path)
    given = ["--folder=runs", "--limit=16577", "--every=50", "--steps=150"]
    with slurm.run_cluster(tmp_path / "box") as box:
        more = {"GLOO_SOCKET_IFNAME": "lo", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(code)}
        how = {"cwd": tmp_path, "env": {**box.environment, **more}}
        words = ["--parsable", "--ntasks-per-node=1", "lightning.sbatch", *given]
        job = box.run(["sbatch", *words], **how).stdout.strip()
        out = tmp_path / f"lightning-{job}.out"

        def wait_until(true):
            end = time.monotonic() + 240
            while not true():
                assert time.monotonic() < end, out.read_text()
                time.sleep(0.1)

        def state():
            said = box.run(["scontrol", "--oneliner", "show", "job", job]).stdout
            return re.search(r"JobState=(\w+)", said)[1]

        wait_until((tmp_path / "runs/last.ckpt").exists)  # 50 steps are made
        box.run(["scancel", "--signal=USR1", job])  # the signal of --signal, sent directly
        wait_until(lambda: state() == "PENDING")
        saved = [path.name for path in (tmp_path / "runs").glob("hpc_ckpt_*")]
        time.sleep(2)
        box.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
        wait_until(lambda: state() in ("COMPLETED", "FAILED"))
        assert state() == "COMPLETED" and saved == ["hpc_ckpt_1.ckpt"], out.read_text()
    last = torch.load(tmp_path / "runs/last.ckpt", weights_only=False)
    assert last["global_step"] == 150
    assert "Starting with 2 processes" in out.read_text()
    assert "hpc_ckpt_1" in out.read_text()  # the second start resumes there
    tables = sorted((tmp_path / "runs/lightning_logs").glob("*/metrics.csv"), key=os.path.getmtime)
    assert float(tables[-1].read_text().splitlines()[-1].split(",")[-1]) < 4  # validation
