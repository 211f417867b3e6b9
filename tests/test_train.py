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
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardlab import count, ranks, show, text
from shardlab.launcher import Place
from shardlab.model import GPT, PRESETS, loss
from shardlab.ranks.agree import time_limit
from shardlab.train import job, options, saved, script, spread

# 143 windows of each part: 8 steps an epoch, and a ninth for a sampler that fills up on 2, 4, 8 or
# 16 ranks. Two epochs begin.
SMALL = {"steps": 10, "every": 5, "limit": 64 * 143 + 1, "sample": 0}
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
        dcp.load(state, checkpoint_id=saved.checkpoints(folder)[-1])
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
    # 8 binary digits: a product is off by up to 2**-8, a loss of 5 by some thousandths.
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


@pytest.mark.parametrize("size, then", [(2, 1), (4, 8), (1, 4)])
def test_a_stop_on_some_ranks_goes_on_with_others(size, then, tmp_path):
    (whole,) = trained("plain", 1, tmp_path / "plain", steps=20, every=20)
    first = trained("resume", size, tmp_path / "parts", steps=11)[0]  # within the second epoch
    rest = trained("resume", then, tmp_path / "parts", steps=20)[0]  # into the third
    assert apart(first + rest, whole) < 2 * LOSS


class Dealt(Exception):
    """Has the loader that a script made, before it trains."""


def dealt(step: str, windows: int, rank: int, world: int, monkeypatch) -> list[list[list[int]]]:
    """Which windows a rank gets in each step of two epochs, as the step's own `main` deals them."""
    main = script.load(step).main
    names = main.__globals__

    def loader(data, *arguments, **options):
        raise Dealt(torch.utils.data.DataLoader(list(range(len(data))), *arguments, **options))

    class Ranks:
        get_rank, get_world_size = staticmethod(lambda: rank), staticmethod(lambda: world)

    class Spread:
        share, shares, model = rank, world, torch.nn.Linear(1, 1)

        def __init__(self, *_):
            pass

    stands_in = {
        "dist": Ranks,
        "GPT": lambda _: torch.nn.Linear(1, 1),
        "DistributedDataParallel": lambda model: model,
        "DataLoader": loader,
        "Windows": lambda _seq, _part: range(windows),
        "Spread": Spread,
        "print": lambda *_: None,
    }
    for name in stands_in:
        monkeypatch.setitem(names, name, stands_in[name])
    with pytest.raises(Dealt) as made:
        main(folder="/tmp", seed=3)
    (loader,) = made.value.args
    epochs = []
    for epoch in (0, 1):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        else:
            loader.sampler.generator.manual_seed(3 + epoch)
        epochs.append([batch.tolist() for batch in loader])
    return epochs


@pytest.mark.parametrize("step", ["sampler", "resume", "take_home"])
def test_each_step_sees_the_windows_of_one_process_whatever_the_size(step, monkeypatch):
    for windows in (16, 31, 32, 33, 40, 45, *range(46, 65), 131, 143, 157, 250):
        one = dealt("plain", windows, 0, 1, monkeypatch)
        for world in (1, 2, 4, 8, 16):
            shares = [dealt(step, windows, rank, world, monkeypatch) for rank in range(world)]
            for epoch in (0, 1):
                assert {len(share[epoch]) for share in shares} == {windows // 16}
                for number, batch in enumerate(one[epoch]):
                    together = [window for share in shares for window in share[epoch][number]]
                    assert sorted(together) == sorted(batch), (windows, world, epoch, number)


@pytest.mark.parametrize("step", ["sampler", "precision", "fsdp2"])
def test_a_batch_that_the_ranks_do_not_divide_is_named(step, tmp_path):
    with pytest.raises(ranks.RankError, match="batch=16: allowed are multiples of 3"):
        trained(step, 3, tmp_path)


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


def test_in_bf16_validation_is_bf16_whichever_the_wrapper(tmp_path):
    """Its loss is off as far as training's is, and by the same products."""
    found = {}
    for name, changes in {
        "float32": {},
        "resume": {"precision": "bf16"},
        "ddp": {"precision": "bf16"},
        "fsdp2": {"precision": "bf16", "strategy": "fsdp2"},
    }.items():
        step = name if name == "resume" else "take_home"
        place = tmp_path / name
        # No step is large enough to move a weight: all validate one model.
        trained(step, 2, place, steps=1, every=1, lr=1e-12, **changes)
        path = saved.checkpoints(place)[-1]
        state = {"state": {"position": [0, 0.0, 0]}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=path)
        found[name] = state["state"]["position"][1]
    assert found["resume"] == found["ddp"]
    assert abs(found["ddp"] - found["fsdp2"]) < 2e-3  # FSDP2 computes norms in bf16 as well
    for name in ("ddp", "fsdp2"):
        assert 1e-6 < abs(found[name] - found["float32"]) < 1e-2


def test_fsdp2_keeps_no_whole_gradient_between_micro_batches():
    def kept():
        model = spread.Spread(GPT(PRESETS["nano"]), "fsdp2")
        tokens, targets = text.batch(32, 2)
        with model.sync_if(True):  # allocates what stays
            loss(model.model(tokens), targets).backward()
        model.model.zero_grad()
        with count.held() as held, model.sync_if(False):
            loss(model.model(tokens), targets).backward()
        return held.now, sum(4 * p.numel() for p in model.plain.parameters())

    for grown, whole in ranks.run(kept, 4, show=False, device="cpu"):
        assert 0 < grown < 0.5 * whole  # its quarter, and the root's weights; else all, and those


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_a_checkpoint_of_another_model_is_not_loaded(strategy, tmp_path, monkeypatch):
    deeper = replace(PRESETS["nano"], layers=PRESETS["nano"].layers + 2)
    trained("take_home", 2, tmp_path / "nano", strategy=strategy, steps=5)
    names = script.load("take_home").__dict__
    monkeypatch.setitem(names["PRESETS"], "deeper", deeper)
    with pytest.raises(ranks.RankError, match="another model"):
        trained("take_home", 2, tmp_path / "nano", strategy=strategy, preset="deeper")
    trained("take_home", 2, tmp_path / "deep", strategy=strategy, preset="deeper", steps=5)
    with pytest.raises(ranks.RankError, match="another model"):
        trained("take_home", 2, tmp_path / "deep", strategy=strategy)
    if strategy != "zero3":  # names that can be read beforehand
        for folder, preset in (("nano", "deeper"), ("deep", "nano"), ("nano", "micro")):
            here = {"strategy": strategy, "preset": preset, "folder": str(tmp_path / folder)}
            with pytest.raises(ValueError, match="preset: blocks"):
                options.check(2, **GOOD | here)


def test_a_loss_that_is_nan_is_no_best_unless_there_is_no_other(tmp_path, monkeypatch):
    trained("take_home", 2, tmp_path / "nan", steps=6, every=2, lr=1e30)
    assert [path.name for path in saved.checkpoints(tmp_path / "nan")] == [
        "step-000002",
        "step-000006",
    ]
    found = iter([3.0, math.nan, 4.0])  # at steps 2 and 4, and of the test
    names = script.load("take_home").__dict__
    monkeypatch.setitem(names, "evaluate", lambda *_: next(found))
    trained("take_home", 1, tmp_path / "later", steps=4, every=2)
    lines = (tmp_path / "later/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"step": 2, "test": 4.0}


def test_a_loss_beyond_floats_has_an_infinite_perplexity(tmp_path):
    trained("take_home", 1, tmp_path, steps=10, every=10, lr=4.0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["test"] > 710  # math.exp would raise


def test_checkpoints_go_by_number(tmp_path):
    for step in (1_000_000, 999_900, 5):
        (tmp_path / script.load("take_home").step_name(step)).mkdir()
    assert [int(path.name[5:]) for path in saved.checkpoints(tmp_path)] == [5, 999_900, 1_000_000]


def test_a_damaged_checkpoint_is_not_loaded(tmp_path):
    trained("take_home", 2, tmp_path, steps=5)
    (path,) = saved.checkpoints(tmp_path)
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    assert set(whole) == {".metadata", "__0_0.distcp", "__1_0.distcp", saved.SUMS}
    chance, variants = random.Random(0), []
    for name, content in whole.items():
        flipped = bytearray(content)
        for _ in range(64):
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        for damaged in (bytes(flipped), content[: len(content) // 2], b"", None):
            variants.append((name, damaged))

    def refused() -> list[bool]:
        found = []
        for name, damaged in [*variants, (saved.SUMS, whole[saved.SUMS])]:
            if dist.get_rank() == 0:
                (path / name).unlink()
                if damaged is not None:
                    (path / name).write_bytes(damaged)
            dist.barrier()
            try:
                saved.verify(path)
                found.append(False)
            except saved.Refused as error:
                found.append("is no whole checkpoint" in str(error))
            dist.barrier()
            if dist.get_rank() == 0:
                (path / name).write_bytes(whole[name])
            dist.barrier()
        return found

    for found in ranks.run(refused, 2, show=False, device="cpu"):
        assert found == [True] * len(variants) + [False]
    (path / "__0_0.distcp").write_bytes(variants[-16][1] or b"")
    with pytest.raises(ranks.RankError, match="is no whole checkpoint"):
        trained("take_home", 2, tmp_path)


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


def begin(folder: Path, size: int, *more: str, script=SCRIPT) -> subprocess.Popen[str]:
    head = [*TORCHRUN, f"--nproc-per-node={size}"] if size else [sys.executable]
    return subprocess.Popen(
        [*head, str(script), "--folder", str(folder), *SHORT, *more],
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
    assert saved.checkpoints(folder)[-1].name == f"step-{made:06d}"

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


def test_a_signal_to_all_processes_leaves_the_loaders_at_work(tmp_path):
    import psutil

    job = begin(tmp_path, 0, "--steps", "100000", "--every", "100000", "--workers", "2")
    until(tmp_path, 5)
    workers = psutil.Process(job.pid).children()
    assert len(workers) >= 2
    for process in [*workers, psutil.Process(job.pid)]:  # the workers first
        process.send_signal(signal.SIGTERM)
    output = ended(job)
    assert (tmp_path / "stopped").exists() and "Traceback" not in output
    assert saved.checkpoints(tmp_path)[-1].name == f"step-{max(steps_of(tmp_path)):06d}"
    assert not any(worker.is_running() for worker in workers)


FAILS = """
import sys
sys.path.insert(0, {code!r})
import train
from shardlab.train import job, options
def main(**options):
    train.averaged = lambda value: 1 / 0
    return train.main(**options)
job.run(main, options.parse(train.main))
"""


def test_an_error_does_not_wait_for_the_loaders(tmp_path):
    (path := tmp_path / "fails.py").write_text(FAILS.format(code=str(SCRIPT.parent)))
    job = begin(tmp_path / "job", 0, "--workers", "2", script=path)
    assert "ZeroDivisionError" in ended(job, status=1)


def test_a_second_job_in_a_folder_is_refused_while_the_first_lives(tmp_path):
    first = begin(tmp_path, 0, "--steps", "100000")
    try:
        until(tmp_path, 3)
        output = ended(begin(tmp_path, 0, "--steps", "5"), status=2)
        (line,) = [text for text in output.splitlines() if "train.py: " in text]
        assert repr(str(tmp_path)) in line and f"process {first.pid} on" in line
    finally:
        first.kill()  # nothing is cleared away
        first.communicate()
    made = max(steps_of(tmp_path))
    ended(begin(tmp_path, 0, "--steps", str(made + 2)))
    assert max(steps_of(tmp_path)) == made + 2


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({0: ("a", "5"), 1: ("b", "5")}, "what .lock in the folder says: rank 0 has"),
        ({0: ("a", "5"), 1: ("a", "6")}, "steps: rank 0 has 5, rank 1 has 6"),
    ],
)
def test_ranks_that_disagree_are_told(own, words, tmp_path):
    """Each rank finds its own options, as with a wrong script around it."""

    def refused():
        folder, steps = own[dist.get_rank()]
        with saved.entered(tmp_path / folder, {"steps": int(steps)}):
            return "entered"

    with pytest.raises(ranks.RankError, match=words):
        ranks.run(refused, 2, show=False, device="cpu")
    own[1] = own[0]
    assert ranks.run(refused, 2, show=False, device="cpu") == ["entered"] * 2


def test_ranks_that_see_another_last_checkpoint_are_told(tmp_path, monkeypatch):
    def refused():
        if dist.get_rank() == 1:  # its host does not see the newest one yet
            monkeypatch.setattr(saved, "checkpoints", lambda folder: [folder / "step-000005"])
        with saved.entered(tmp_path, {}):
            return "entered"

    (tmp_path / "step-000010").mkdir()
    with pytest.raises(
        ranks.RankError, match="checkpoint: rank 0 has 'step-000010', .*'step-000005'"
    ):
        ranks.run(refused, 2, show=False, device="cpu")


@pytest.mark.parametrize("folder", ["/proc/none", "file/below"])
def test_a_folder_that_cannot_be_written_is_named(folder, tmp_path):
    (tmp_path / "file").write_text("")
    words = f"folder={str(tmp_path / folder)!r}: allowed are"
    output = ended(begin(tmp_path / folder, 0), status=2)
    assert "Traceback" not in output and words in output.splitlines()[-1]

    def refused():
        place = tmp_path / folder if dist.get_rank() == 1 else tmp_path / "fine"
        with pytest.raises(saved.Refused, match=re.escape(words)), saved.entered(place, {}):
            pass

    ranks.run(refused, 2, show=False, device="cpu")  # all know of what one has


def test_a_text_that_is_too_short_is_named(tmp_path):
    (path := tmp_path / "text").write_bytes(bytes(1000))
    options.check(1, **GOOD | {"folder": str(tmp_path), "source": str(path), "batch": 12})
    for batch in (13, 16, 10**18):
        with pytest.raises(ValueError, match="part for train has 800 bytes; allowed are "):
            options.check(1, **GOOD | {"folder": "none", "source": str(path), "batch": batch})


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
        ({"steps": 10**30}, "steps=1000000000000000000000000000000: allowed are whole"),
        ({"batch": 6}, "batch=6: allowed are multiples of 4"),
        ({"micro": 0}, "micro=0: allowed are"),
        ({"lr": -1.0}, "lr=-1.0: allowed are numbers above 0"),
        ({"lr": math.inf}, "lr=inf: allowed are numbers above 0 to"),
        ({"micro": 2**63}, "micro=9223372036854775808: allowed are whole numbers, 1 to"),
        ({"clip": 0.0}, "clip=0.0: allowed are"),
        ({"seed": -1}, "seed=-1: allowed are"),
        ({"seed": 2**64}, "seed=18446744073709551616: allowed are whole numbers, 0 to"),
        ({"dropout": 1.0}, "dropout=1.0: allowed are numbers from 0 to below 1"),
        ({"limit": 100}, "limit=100: allowed are"),
        ({"report": 0}, "report=0: allowed are"),
        ({"precision": "fp8"}, "precision='fp8': allowed are float32, bf16, fp16"),
        ({"precision": "fp16", "strategy": "zero3"}, "precision='fp16' with strategy='zero3'"),
        ({"strategy": "fsdp1"}, "strategy='fsdp1': allowed are ddp, fsdp2"),
        ({"tensor": 2}, "tensor=2 with strategy='ddp': allowed is 1"),
        ({"tensor": 3, "strategy": "tensor"}, "tensor=3: allowed are divisors of 4 ranks"),
        ({"workers": -1}, "workers=-1: allowed are"),
        ({"workers": 10**6}, "workers=1000000: allowed are whole numbers, 0 to 1,000"),
        *(({"folder": name}, f"folder={name!r}: allowed") for name in ("", "a\nb", "~no_such/x")),
        ({"peak": 0.0}, "peak=0.0: allowed are"),
        ({"timeout": 0.0}, "timeout=0.0: allowed are"),
        ({"timeout": math.inf}, "timeout=inf: allowed are numbers above 0 to 1e+09"),
        ({"timeout": 1e300}, "timeout=1e+300: allowed are"),
        ({"peak": math.inf}, "peak=inf: allowed are"),
        ({"compiler": "nonsense"}, "compiler='nonsense': allowed are aot_eager"),
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
    output = ended(begin(tmp_path / "never", 0, "--steps", "many"), status=2)
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
