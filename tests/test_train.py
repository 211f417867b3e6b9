"""Each step of the training script, and code/train.py, equal one process."""

from __future__ import annotations

import contextlib
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
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import run_forked

from shardlab import ranks
from shardlab.common import show, text
from shardlab.gpt.model import GPT, PRESETS
from shardlab.measure import count
from shardlab.train import core, one_gpu, take_home
from shardlab.train.take_home import JobError, Options, Training, list_checkpoints

# 143 windows of each part: 8 steps an epoch, and a ninth for a sampler that fills up on 2, 4, 8 or
# 16 ranks. Two epochs begin.
SMALL = {"steps": 10, "every": 5, "limit": 64 * 143 + 1}
# Two orders of 1,024 tokens: 2 sqrt(1024) roundings of a loss of 5.5, and of what steps take off.
# Rounding may turn AdamW's step, of 1e-3, of a weight, whose next gradients are some 0.01; but it
# moves weights by some hundredths of a step.
LOSS, WEIGHT = 4 * 1024**0.5 * 2**-24 * 5.5 + 2 * 1e-3 * 0.01, 2e-4


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights after the last step, from any kind of checkpoint."""
    if (folder / "last.pt").exists():
        return torch.load(folder / "last.pt", "cpu")
    return load_saved(folder, {"model": GPT(PRESETS["nano"]).state_dict()})["model"]


def load_saved(folder: Path, state: dict) -> dict:
    """Return `state` in the last checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process is alone
        dcp.load({"state": state}, checkpoint_id=list_checkpoints(folder)[-1])
    return state


def train_script(script, size: int, folder: Path, **changes) -> list[list[float]]:
    """Return the losses of each rank; code/train.py trains the course's model."""

    def main():
        if script is take_home:
            options = Options(folder=str(folder), **SMALL | changes)
            config = replace(PRESETS["nano"], layers=options.layers, dropout=options.dropout)
            return take_home.main(options, lambda _: GPT(config))
        return script.main(folder=folder, sample=0, **SMALL | changes)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ranks.run(main, size, show=False, timeout=60)


def read_metrics(folder: Path, name: str) -> dict[int, float]:
    """Return the values of metrics.jsonl under a name, by step; the last where a step has two."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {line["step"]: line[name] for line in found if name in line}


def max_gap(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of one process."""
    folder = tmp_path_factory.mktemp("one")
    (losses,) = train_script(one_gpu, 1, folder)
    return losses, load_weights(folder)


def test_the_whole_script_equals_one_process(one, tmp_path):
    """The script runs on four ranks; the lesson itself takes two, as do the earlier steps."""
    losses = train_script(core, 4, tmp_path)
    assert max_gap(losses[0], one[0]) < LOSS
    assert all(own == losses[0] for own in losses)  # all ranks report one loss
    found = load_weights(tmp_path)
    assert max((found[name] - one[1][name]).abs().max() for name in found) < WEIGHT


@pytest.mark.weekly("trains in float16 and bfloat16")
def test_half_precision_is_near(one, tmp_path):
    # 26 products in a row, each off by up to 2^-8 of logits of 0.5: sqrt(26) of that is 1e-2.
    losses = train_script(take_home, 2, tmp_path / "bf16", precision="bf16", micro=4)
    assert 1e-6 < max_gap(losses[0], one[0]) < 1e-2
    # fp16 rounds at 2^-11, an eighth. Its scaler starts at 2**16, where nothing overflows here.
    losses = train_script(take_home, 2, tmp_path / "fp16", precision="fp16", micro=4)
    assert 1e-6 < max_gap(losses[0], one[0]) < 2e-3
    losses = train_script(take_home, 2, tmp_path / "fsdp2", precision="bf16", strategy="fsdp2")
    assert 1e-6 < max_gap(losses[0], one[0]) < 1e-2


def test_a_signal_saves_the_next_step_before_anything_else(tmp_path, monkeypatch):
    train_script(take_home, 2, tmp_path / "whole")
    original, calls = Training.clip_gradients, []

    def clip(self):
        if self.steps_done + 1 == during and dist.get_rank() == 1:  # on one rank only
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(self)

    def note_method(name, method):
        return lambda self, *given: (calls.append((name, self.steps_done)), method(self, *given))[1]

    def main():
        options = Options(folder=str(folder), **SMALL | {"report": 100})
        take_home.main(options, lambda _: GPT(PRESETS["nano"]))
        return calls

    for name in ("save", "evaluate"):
        monkeypatch.setattr(Training, name, note_method(name, getattr(Training, name)))
    for during in (4, 9):  # the fifth step is validated; the tenth is the last
        folder = tmp_path / f"stopped-{during}"
        monkeypatch.setattr(Training, "clip_gradients", clip)
        for calls_of_rank in ranks.run(main, 2, show=False, timeout=60):
            after = [call for call in calls_of_rank if call[1] >= during]
            assert after == [("save", during + 1)]
        assert (folder / "stopped").exists()
        monkeypatch.setattr(Training, "clip_gradients", original)
        ranks.run(main, 2, show=False, timeout=60)
        for name in ("validation", "test"):  # nothing is left out, and the best is the same one
            assert read_metrics(folder, name) == read_metrics(tmp_path / "whole", name)


def test_a_stop_within_an_epoch_changes_no_bit(tmp_path):
    size = 2
    dropped = {"dropout": 0.1, "micro": 3}
    whole = train_script(take_home, size, tmp_path / "whole", **dropped)[0]
    parts = []
    for steps in (3, 9, 10):  # within the first epoch, and within the second
        parts += train_script(take_home, size, tmp_path / "parts", **dropped | {"steps": steps})[0]
    assert parts == whole
    a, b = load_weights(tmp_path / "whole"), load_weights(tmp_path / "parts")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_stop_on_some_ranks_goes_on_with_others(tmp_path):
    (whole,) = train_script(one_gpu, 1, tmp_path / "plain", steps=20, every=20)
    for size, first, then, rest in (
        (2, {}, 4, {"strategy": "zero1"}),
        (4, {"strategy": "fsdp2", "tensor": 2}, 2, {}),
    ):
        run = partial(train_script, take_home, folder=tmp_path / f"then-{then}", every=20)
        parts = run(size, steps=11, **first)[0]  # in epoch 2
        parts += run(then, steps=20, **rest)[0]  # into the third
        assert max_gap(parts, whole) < LOSS


def test_a_batch_that_the_ranks_do_not_divide_is_named(tmp_path):
    with pytest.raises(ranks.RankError, match="batch=16: must be a multiple of 3"):
        train_script(core, 3, tmp_path)


def test_a_killed_save_leaves_the_last_checkpoint(one, tmp_path):
    train_script(take_home, 2, tmp_path, steps=5)
    for path in (tmp_path / "step-000005").iterdir():  # the files of a killed save of step 7
        (tmp_path / ".step-000007").mkdir(exist_ok=True)
        (tmp_path / ".step-000007" / path.name).write_bytes(path.read_bytes()[:100])
    assert max_gap(train_script(take_home, 4, tmp_path, strategy="fsdp2")[0], one[0][5:]) < LOSS


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": "zero2"},
        {"strategy": "zero1", "tensor": 2, "micro": 4},  # fsdp2, and with tensor ranks: above
    ],
)
def test_a_strategy_equals_one_process_and_goes_on(changes, one, tmp_path):
    changes = {"micro": 2, "report": 1, "peak": 1e12} | changes  # two micro-batches
    first = train_script(take_home, 4, tmp_path, steps=6, **changes)
    assert max_gap(first[0], one[0][:6]) < LOSS and all(own == first[0] for own in first)
    assert max_gap(train_script(take_home, 4, tmp_path, **changes)[0], one[0][6:]) < LOSS
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line for line in lines if "loss" in line}
    parameters = sum(p.numel() for p in GPT(PRESETS["nano"]).parameters())
    assert max_gap([by_step[n]["loss"] for n in range(1, 11)], one[0]) < LOSS
    for line in by_step.values():
        assert line["memory_bytes"] > 1e6 and line["seconds"] > 0 and line["norm"] > 0
        assert abs(line["time"] - time.time()) < 600
        assert math.isclose(line["tokens_per_second"] * line["seconds"], 16 * 64)
        flops = line["tokens_per_second"] * (6 * parameters + 12 * 2 * 64 * 64)
        assert math.isclose(line["mfu"], flops / 4 / 1e12)
    assert [line["step"] for line in lines if "test" in line]


def on_a_rank(build=lambda: GPT(PRESETS["nano"]), **options) -> Training:
    """Return a training that has not begun, on a rank."""
    chosen, device = Options(folder=options.pop("folder", "/tmp/none"), **options), ranks.device()
    torch.manual_seed(0)
    return Training(chosen, take_home.parallelize_model(build(), chosen, device), device)


def test_every_token_that_counts_weighs_the_same(tmp_path):
    """The last texts are short, and the very last ones have no targets: a rank's whole share."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(256, (2, 16, 64), generator=generator)
    targets[8:, 8:], targets[12:] = -100, -100

    def step(**options):
        own = lambda: take_home.GPT(Options())  # noqa: E731
        training = on_a_rank(own, folder=str(tmp_path), clip=1e9, **options)
        share = (x.chunk(training.replicas)[training.replica] for x in (tokens, targets))
        loss, norm = training.step(*share)
        return loss.item(), norm.item()

    one = ranks.run(step, 1, show=False, device="cpu")[0]
    rounding = 2 * 16 * 64 * 2**-24  # sums over so many tokens in float32, in two orders
    for size, how in (
        (1, {"micro": 4}),
        (2, {}),
        *((4, {"strategy": strategy, "micro": 2}) for strategy in take_home.STRATEGIES),
        (4, {"strategy": "fsdp2", "tensor": 2, "micro": 4}),
    ):
        for found in ranks.run(partial(step, **how), size, show=False, device="cpu"):
            assert found == pytest.approx(one, rel=rounding), how


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_zero1_alone_keeps_whole_gradients_between_micro_batches(strategy, tmp_path):
    def measure_kept():
        training = on_a_rank(strategy=strategy, micro=1, folder=str(tmp_path))
        whole = sum(4 * p.numel() for p in training.model.parameters())
        # The first backward allocates the buffers that stay.
        training.backward(*text.get_batch(32, 2), torch.tensor(64.0))
        training.optimizer.zero_grad()
        between = []

        def look(value, *_):  # after the first backward, in the second's forward
            time.sleep(0.2)  # until gloo's thread releases the last gathered block
            between.append(held.current_bytes)
            return original(value, *_)

        original = take_home.compute_loss
        with count.track_memory() as held, contextlib.ExitStack() as undone:
            undone.callback(setattr, take_home, "compute_loss", original)
            take_home.compute_loss = look
            training.backward(*text.get_batch(32, 2), torch.tensor(64.0))
        return between[1] - between[0], whole

    for grown, whole in ranks.run(measure_kept, 4, show=False, device="cpu"):
        if strategy == "zero1":
            assert 0.7 * whole < grown
        else:
            assert grown < 0.5 * whole  # its quarter


def test_a_checkpoint_of_another_model_is_not_loaded(tmp_path):
    def list_refusals() -> list[str]:
        found, trainings = [], {}
        for layers in (2, 4):
            config = replace(PRESETS["nano"], layers=layers)
            how = {"folder": str(tmp_path / str(layers)), "strategy": "fsdp2"}
            trainings[layers] = on_a_rank(lambda config=config: GPT(config), **how)
            trainings[layers].save()
        for layers, other in ((2, 4), (4, 2)):
            with pytest.raises(JobError) as refused:
                trainings[layers].load(*list_checkpoints(tmp_path / str(other)))
            found.append(str(refused.value))
        return found

    for found in ranks.run(list_refusals, 2, show=False, device="cpu"):
        assert all("is of another model: state.model.blocks.2" in words for words in found)


def test_a_damaged_checkpoint_is_not_loaded(tmp_path):
    train_script(take_home, 2, tmp_path, steps=5)
    (path,) = list_checkpoints(tmp_path)
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    assert set(whole) == {".metadata", "__0_0.distcp", "__1_0.distcp", "SHA256SUMS"}
    checked = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(checked, cwd=path).returncode == 0
    chance, variants = random.Random(0), []
    for name, content in whole.items():
        flipped = bytearray(content)
        for _ in range(64):
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        for damaged in (bytes(flipped), content[: len(content) // 2], b"", None):
            variants.append((name, damaged))

    def list_outcomes() -> list[bool]:
        found, training = [], on_a_rank(folder=str(tmp_path))
        for name, damaged in [*variants, ("SHA256SUMS", whole["SHA256SUMS"])]:
            if dist.get_rank() == 0:
                (path / name).unlink()
                if damaged is not None:
                    (path / name).write_bytes(damaged)
            dist.barrier()
            try:
                training.load(path)
                found.append(False)
            except JobError as error:
                found.append("is not a complete checkpoint" in str(error))
            dist.barrier()
            if dist.get_rank() == 0:
                (path / name).write_bytes(whole[name])
            dist.barrier()
        return found

    for found in ranks.run(list_outcomes, 2, show=False, device="cpu"):
        assert found == [True] * len(variants) + [False]


def test_workers_change_nothing(one, tmp_path):
    losses = train_script(take_home, 2, tmp_path, workers=2)[0]
    assert max_gap(losses, one[0]) < LOSS


# code/train.py as a job: processes of torchrun, signals, kills.

SCRIPT = show.ROOT / "code/train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2"]
TORCHRUN += ["--local-addr=127.0.0.1"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
# Without it, restarted ranks may read the addresses of dead ones (torch 2.13).
ENVIRONMENT |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"PYTHONUNBUFFERED": "1"}  # an error is the last line, after all prints
SHORT = ["--limit", str(SMALL["limit"]), "--every", "5", "--report", "1"]


def start_job(folder: Path, size: int, *more: str) -> subprocess.Popen[str]:
    head = [*TORCHRUN, f"--nproc-per-node={size}"] if size else [sys.executable]
    command = [*head, str(SCRIPT), "--folder", str(folder), *SHORT, *more]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **output, env=ENVIRONMENT, start_new_session=True)


def wait_for_exit(process: subprocess.Popen[str], status: int = 0) -> str:
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status, output
    return output


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while max(read_metrics(folder, "loss"), default=0) < step:
        assert time.monotonic() < deadline, "the job does not get there"
        time.sleep(0.02)


def run_alone(folder: Path, *options: str) -> tuple[int, str]:
    """Run the script on one rank, in a fork; return exit status and output."""

    def main() -> None:
        sys.argv = [str(SCRIPT), "--folder", str(folder), *SHORT, *options]
        take_home.run()

    return run_forked(main, folder.parent, ENVIRONMENT)


def test_a_job_outlives_a_killed_rank_and_signals_and_goes_on(tmp_path):
    import psutil

    options = Options(folder=str(tmp_path / "whole"), limit=SMALL["limit"], every=5, steps=30)
    (whole,) = ranks.run(lambda: take_home.main(options), 1, show=False, device="cpu")
    folder = tmp_path / "job"
    first = start_job(folder, 2, "--steps", "100000")
    wait_for_step(folder, 8)
    psutil.Process(first.pid).children()[0].kill()  # it has locked the folder
    killed_after = max(read_metrics(folder, "loss"))
    wait_for_step(folder, killed_after + 6)  # torchrun has restarted all ranks
    first.send_signal(signal.SIGTERM)  # torchrun forwards it, and then fails itself
    output = wait_for_exit(first, status=1)
    assert (folder / "stopped").exists()
    assert "\r" not in output  # a progress bar is for terminals
    made = max(read_metrics(folder, "loss"))
    assert list_checkpoints(folder)[-1].name == f"step-{made:06d}"

    second = start_job(folder, 0, "--steps", "100000", "--strategy", "fsdp2")
    wait_for_step(folder, made + 3)
    status, output = run_alone(folder, "--steps", "5")  # while the second job lives
    (line,) = [text for text in output.splitlines() if "train.py: " in text]
    assert status == 2 and repr(str(folder)) in line and f"process {second.pid} on" in line
    second.send_signal(signal.SIGUSR1)
    wait_for_exit(second)
    assert (folder / "stopped").exists()
    made = max(read_metrics(folder, "loss"))

    status, output = run_alone(folder, "--steps", str(max(30, made + 1)))
    assert status == 0 and not (folder / "stopped").exists(), output
    found = read_metrics(folder, "loss")
    assert list(found) == list(range(1, max(30, made + 1) + 1))
    assert max_gap([found[n + 1] for n in range(30)], whole) < LOSS


def test_ranks_that_disagree_are_told(tmp_path):
    """Each rank has its own options, as with a wrong launcher script."""

    def lock_with(*own):
        with take_home.lock_folder(Options(folder=str(tmp_path), steps=own[dist.get_rank()])):
            return "entered"

    with pytest.raises(ranks.RankError, match="steps: rank 0 has 5, rank 1 has 6"):
        ranks.run(lock_with, 2, 5, 6, show=False, device="cpu")
    assert ranks.run(lock_with, 2, 5, 5, show=False, device="cpu") == ["entered"] * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": "/no/such"}, "source='/no/such': must be"),
        ({"steps": 0}, "steps=0: must be"),
        ({"batch": 6}, "batch=6: must be"),
        ({"lr": math.nan}, "lr=nan: must be"),
        ({"limit": 100}, "source='stdlib': each part must have more than"),
        ({"tensor": 2}, "tensor=2: must be 1 with strategy='ddp'"),
        ({"tensor": 3, "strategy": "fsdp2"}, "tensor=3: must divide"),
    ],
)
def test_bad_options_are_named(changes, words):
    Options(limit=5000).check_world_size(4)
    with pytest.raises(JobError, match=re.escape(words)):
        Options(**changes).check_world_size(4)


def test_what_a_job_is_given_and_cannot_be_is_one_line(tmp_path):
    (tmp_path / "broken/step-000001").mkdir(parents=True)
    for folder, changes, words in (
        ("broken", ["--resume", "never"], "has checkpoints; use resume='auto'"),
        ("never", ["--stepz", "1"], "train.py: unrecognized arguments: --stepz 1"),
        ("never", ["--steps", "0"], "train.py: steps=0: must be from 1 to 1e+18"),
    ):
        status, output = run_alone(tmp_path / folder, *changes)
        assert status == 2 and "Traceback" not in output and words in output.splitlines()[-1]
    assert not (tmp_path / "never").exists()


def test_the_script_to_take_home_runs_where_there_is_nothing_but_torch(tmp_path):
    """Run in another folder, without the course, on the reader's text."""
    (tmp_path / "train.py").write_bytes(SCRIPT.read_bytes())
    (tmp_path / "book.txt").write_text(
        "It was the best of times, it was the worst of times. " * 500
    )
    hidden = "import sys; sys.modules['shardlab'] = None; sys.argv[0] = 'train.py'; import train"
    command = [sys.executable, "-c", f"{hidden}; train.run()", "--source", "book.txt"]
    command += ["--steps", "30", "--every", "30"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["test"] < 3
    assert SCRIPT.read_bytes() == Path(take_home.__file__).read_bytes()


def test_a_launcher_says_which_rank_a_process_is(monkeypatch):
    monkeypatch.setattr(os, "environ", own := {})
    assert take_home.read_launch_environment() == (0, 1) and own == {"LOCAL_RANK": "0"}
    of_slurm = {"PROCID": "5", "LOCALID": "1", "STEP_NUM_TASKS": "8", "JOB_ID": "4711"}
    own = {f"SLURM_{name}": value for name, value in of_slurm.items()}
    own["SLURM_STEP_NODELIST"] = "node[3-4]"
    monkeypatch.setattr(os, "environ", own)
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: "node3\nnode4\n")
    assert take_home.read_launch_environment() == (5, 8)
    found = [own[name] for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
    assert found == ["1", "node3", "24711"]
