"""Every step of the training script computes what one process computes; the last one is a job."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardlab import ranks, show
from shardlab.launcher import Place
from shardlab.model import GPT, PRESETS
from shardlab.ranks.agree import time_limit
from shardlab.train import job, options, script, spread

# 131 windows of each part: 8 steps an epoch, and no number of ranks divides 131. Two epochs begin.
SMALL = {"steps": 10, "every": 5, "limit": 64 * 131 + 1, "sample": 0}
# Sums in another order: a last digit of a loss near 5, and AdamW takes steps of 1e-3 times the sign
# of gradients near 0, so a weight may differ by a few hundredths of a step.
LOSS, WEIGHT = 5e-6, 2e-4
ALONE = script.steps[: script.steps.index("rank0")]  # each rank writes: each needs a folder
MORE = {"compile": {"compiler": "aot_eager"}}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights after the last step, whichever way they were saved."""
    if (folder / "last.pt").exists():
        found = torch.load(folder / "last.pt", "cpu")
        return {name.removeprefix("module."): tensor for name, tensor in found.items()}
    state = {"state": {"model": GPT(PRESETS["nano"]).state_dict()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process is alone
        dcp.load(state, checkpoint_id=sorted(folder.glob("step-*"))[-1])
    return state["state"]["model"]


def trained(step: str, size: int, folder: Path, **changes) -> list[list[float]]:
    """The losses of each rank."""

    def main():
        own = folder / str(dist.get_rank()) if step in ALONE else folder
        return script.load(step).main(folder=own, **SMALL | changes)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ranks.run(main, size, show=False, timeout=60)


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process."""
    folder = tmp_path_factory.mktemp("one")
    (losses,) = trained("plain", 1, folder)
    return losses, weights(folder / "0")


# The lesson itself takes two ranks.
@pytest.mark.parametrize("step, size", [*((s, 4) for s in script.steps[1:-1]), ("fsdp2", 1)])
def test_a_step_equals_one_process(step, size, one, tmp_path):
    changes = dict(MORE.get(step, {}))
    if "micro=" in script.text(step):
        changes["micro"] = 2
    losses = trained(step, size, tmp_path, **changes)
    mean = [sum(values) / size for values in zip(*losses, strict=True)]
    assert apart(mean, one[0]) < LOSS
    if step in script.steps[script.steps.index("losses") :]:
        assert all(own == losses[0] for own in losses)  # all ranks report one loss
    found = weights(tmp_path / "0" if step in ALONE else tmp_path)
    assert max((found[name] - one[1][name]).abs().max() for name in found) < WEIGHT


def test_four_ranks_without_a_group_train_four_models(one, tmp_path):
    losses = trained("plain", 4, tmp_path)
    assert losses == [one[0]] * 4


def test_half_precision_is_near(one, tmp_path):
    # 8 binary digits: a product is off by 2**-9, a loss of 5 by some thousandths.
    losses = trained("precision", 2, tmp_path / "bf16", precision="bf16", micro=4)
    assert 1e-6 < apart(losses[0], one[0]) < 1e-2
    # fp16 has 11 digits, and its scaler starts at 2**16, where nothing overflows here.
    losses = trained("precision", 2, tmp_path / "fp16", precision="fp16", micro=4)
    assert 1e-6 < apart(losses[0], one[0]) < 2e-3


@pytest.mark.parametrize("size", [1, 2])
def test_a_stop_within_an_epoch_changes_no_bit(size, tmp_path):
    dropped = {"dropout": 0.1, "micro": 3}
    whole = trained("resume", size, tmp_path / "whole", **dropped)[0]
    parts = []
    for steps in (3, 9, 10):  # within the first epoch, and within the second
        parts += trained("resume", size, tmp_path / "parts", **dropped | {"steps": steps})[0]
    assert parts == whole
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_killed_save_leaves_the_last_checkpoint(one, tmp_path):
    trained("resume", 2, tmp_path, steps=5)
    for path in (tmp_path / "step-000005").iterdir():  # as far as a killed save of step 7 got
        (tmp_path / ".step-000007").mkdir(exist_ok=True)
        (tmp_path / ".step-000007" / path.name).write_bytes(path.read_bytes()[:100])
    assert apart(trained("fsdp2", 4, tmp_path)[0], one[0][5:]) < LOSS


@pytest.mark.parametrize("strategy", spread.STRATEGIES)
def test_a_strategy_equals_one_process_and_goes_on(strategy, one, tmp_path):
    changes = {"strategy": strategy, "tensor": 2 if strategy == "tensor" else 1, "micro": 2}
    first = trained("take_home", 4, tmp_path, steps=6, **changes)
    assert apart(first[0], one[0][:6]) < LOSS and all(own == first[0] for own in first)
    assert apart(trained("take_home", 4, tmp_path, **changes)[0], one[0][6:]) < LOSS
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line for line in lines if "loss" in line}
    assert math.isclose(by_step[10]["loss"], one[0][9], abs_tol=LOSS)
    for line in by_step.values():
        assert line["memory_bytes"] > 1e6 and line["seconds"] > 0 and line["norm"] > 0
        assert abs(line["time"] - time.time()) < 600
        assert math.isclose(line["tokens_per_second"] * line["seconds"], 16 * 64)
    assert [line["step"] for line in lines if "test" in line]


def test_the_groups_of_tensor_parallelism_wait_no_longer_than_the_run():
    def limits():
        model = spread.Spread(GPT(PRESETS["nano"]), "tensor", 2).model
        groups = (model.process_group, model.module.head.group)
        own = [g._get_backend(torch.device("cpu")).options._timeout for g in groups]
        return own, time_limit(dist.group.WORLD)

    for own, of_the_run in ranks.run(limits, 2, show=False, device="cpu"):
        assert own == [of_the_run] * 2  # gloo's would be half an hour


def test_of_half_precision_a_strategy_takes_what_it_can(one, tmp_path):
    for strategy in ("fsdp2", "zero3"):
        changes = {"strategy": strategy, "precision": "bf16"}
        losses = trained("take_home", 2, tmp_path / strategy, **changes)[0]
        assert 1e-6 < apart(losses, one[0]) < 1e-2


def test_workers_change_nothing(one, tmp_path):
    losses = trained("take_home", 2, tmp_path, workers=2)[0]
    assert apart(losses, one[0]) < LOSS


# The take-home script as a job: processes of torchrun's, signals, kills.

SCRIPT = show.ROOT / "code/train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
# Without it, restarted ranks may read the addresses of dead ones (torch 2.13).
ENVIRONMENT |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
SHORT = ["--limit", str(SMALL["limit"]), "--sample", "0", "--every", "5", "--report", "1"]


def begin(folder: Path, size: int, *more: str) -> subprocess.Popen[str]:
    head = [*TORCHRUN, f"--nproc-per-node={size}"] if size else [sys.executable]
    return subprocess.Popen(
        [*head, str(SCRIPT), "--folder", str(folder), *SHORT, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], status: int = 0) -> str:
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status, output
    return output


def steps_of(folder: Path) -> dict[int, float]:
    """The loss of each step, the last one where a step was made twice."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {line["step"]: line["loss"] for line in found if "loss" in line}


def until(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while max(steps_of(folder), default=0) < step:
        assert time.monotonic() < deadline, "the job does not get there"
        time.sleep(0.02)


def rank_processes(process: subprocess.Popen[str]) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(process.pid).children()]


def test_a_job_is_stopped_by_signals_and_goes_on_with_more_ranks(tmp_path):
    (whole,) = trained("plain", 1, tmp_path / "plain", steps=30, every=30)
    folder = tmp_path / "job"
    first = begin(folder, 2, "--steps", "100000")
    until(folder, 7)
    os.kill(random.Random(0).choice(rank_processes(first)), signal.SIGUSR1)  # one rank alone
    output = ended(first)
    assert (folder / "stopped").exists() and "Traceback" not in output
    assert "\r" not in output  # a progress bar is for terminals
    assert output.count("step ") == len(re.findall(r"^step \d+: validation", output, re.M))
    made = max(steps_of(folder))
    assert sorted(folder.glob("step-*"))[-1].name == f"step-{made:06d}"

    second = begin(folder, 4, "--steps", "100000", "--strategy", "fsdp2")
    until(folder, made + 5)
    second.send_signal(signal.SIGTERM)  # to torchrun, which hands it on, and then fails itself
    ended(second, status=1)
    assert (folder / "stopped").exists()
    made = max(steps_of(folder))

    ended(begin(folder, 0, "--steps", str(max(30, made + 1))))
    assert not (folder / "stopped").exists()
    found = steps_of(folder)
    assert list(found) == list(range(1, max(30, made + 1) + 1))
    assert apart([found[n + 1] for n in range(30)], whole) < 2e-5  # three kinds of sums in a row


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path):
    (whole,) = trained("plain", 1, tmp_path / "plain", steps=20, every=20)
    folder = tmp_path / "job"
    process = begin(folder, 2, "--steps", "20000")
    until(folder, 8)
    os.kill(rank_processes(process)[1], signal.SIGKILL)
    killed_after = max(steps_of(folder))
    until(folder, killed_after + 15)  # torchrun has started all ranks again
    process.send_signal(signal.SIGTERM)
    ended(process, status=1)
    found = steps_of(folder)
    assert apart([found[n] for n in range(1, 21)], whole) < 2e-5


def test_in_a_terminal_rank_0_draws_a_bar(tmp_path):
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path), *SHORT, "--steps", "3"]
    done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, env=ENVIRONMENT)
    os.close(theirs)
    drawn = ""
    while True:
        try:
            drawn += os.read(ours, 10_000).decode()
        except OSError:  # the other end is closed, and all is read
            break
    assert done.returncode == 0 and "3/3" in drawn and "loss=" in drawn


GOOD = {
    **{p: d for p, d in zip(options.WORDS, [None] * 99, strict=False)},
    **dict(preset="nano", source="stdlib", steps=1, batch=8, micro=4, lr=1e-3, clip=1.0, seed=0),
    **dict(dropout=0.0, limit=None, every=1, report=1, sample=0, precision="float32"),
    **dict(compiler=None, strategy="ddp", tensor=1, workers=0, peak=None, resume="auto"),
    **dict(timeout=60.0),
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "huge"}, "preset='huge': allowed are nano, micro"),
        ({"source": "/no/such"}, "source='/no/such': allowed are"),
        ({"steps": 0}, "steps=0: allowed are whole numbers, 1 or more"),
        ({"batch": 6}, "batch=6: allowed are multiples of 4"),
        ({"micro": 0}, "micro=0: allowed are"),
        ({"lr": -1.0}, "lr=-1.0: allowed are numbers above 0"),
        ({"clip": 0.0}, "clip=0.0: allowed are"),
        ({"seed": -1}, "seed=-1: allowed are"),
        ({"dropout": 1.0}, "dropout=1.0: allowed are numbers from 0 to below 1"),
        ({"limit": 100}, "limit=100: allowed are"),
        ({"report": 0}, "report=0: allowed are"),
        ({"precision": "fp8"}, "precision='fp8': allowed are float32, bf16, fp16"),
        ({"precision": "fp16", "strategy": "zero3"}, "precision='fp16' with strategy='zero3'"),
        ({"strategy": "fsdp1"}, "strategy='fsdp1': allowed are ddp, fsdp2"),
        ({"tensor": 2}, "tensor=2 with strategy='ddp': allowed is 1"),
        ({"tensor": 3, "strategy": "tensor"}, "tensor=3: allowed are divisors of 4 ranks"),
        ({"workers": -1}, "workers=-1: allowed are"),
        ({"peak": 0.0}, "peak=0.0: allowed are"),
        ({"timeout": 0.0}, "timeout=0.0: allowed are"),
        ({"resume": "yes"}, "resume='yes': allowed are auto and never"),
    ],
)
def test_bad_options_are_named(changes, words, tmp_path):
    options.check(4, **GOOD | {"folder": str(tmp_path)})
    with pytest.raises(ValueError, match=re.escape(words)):
        options.check(4, **GOOD | {"folder": str(tmp_path)} | changes)


def test_a_folder_that_does_not_fit_is_named(tmp_path):
    trained("take_home", 2, tmp_path / "zero", strategy="zero2", steps=5)
    trained("take_home", 2, tmp_path / "ddp", steps=5)
    (tmp_path / "file").write_text("")
    (tmp_path / "broken/step-000001").mkdir(parents=True)
    for folder, world, changes, words in (
        ("zero", 4, {"strategy": "zero2"}, "is of zero2 on 2 ranks; allowed is the same"),
        ("zero", 2, {"strategy": "ddp"}, "is of zero2 on 2 ranks; allowed is ddp or fsdp2"),
        ("ddp", 2, {"strategy": "zero1"}, "is of ddp or fsdp2; allowed is the same"),
        ("ddp", 2, {"resume": "never"}, "holds checkpoints; allowed are an empty folder"),
        ("file", 2, {}, "this is a file; allowed is a folder"),
        ("broken", 2, {}, "is no whole checkpoint"),
    ):
        with pytest.raises(ValueError, match=words):
            options.check(world, **GOOD | {"folder": str(tmp_path / folder)} | changes)


def test_a_bad_option_starts_nothing(tmp_path):
    output = ended(begin(tmp_path / "never", 0, "--steps", "many"), status=1)
    assert output.splitlines()[-1].endswith("steps='many': allowed are whole numbers")
    assert not (tmp_path / "never").exists()


def test_without_a_launcher_a_process_is_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert job.launched() == Place(rank=0, size=1, local_rank=0)


def test_every_step_is_formatted_and_lint_finds_nothing(tmp_path):
    for step in script.steps:
        (tmp_path / f"{step}.py").write_text(script.text(step))
    ruff = [Path(sys.executable).with_name("ruff"), "--config", show.ROOT / "pyproject.toml"]
    sources = ["--config", f"src=['{show.ROOT}/code']"]
    for command in ([*ruff, "check", *sources], [*ruff, "format", "--check", *sources]):
        done = subprocess.run([*map(str, command), str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
