"""Benchmark of a step of code/train.py against a step of Lightning's Trainer.

    python benchmarks/train.py            # a table; some eight minutes on two cores
    python benchmarks/train.py --json     # {"rows": [{"case", "against", "ranks", …}, …]}
    python benchmarks/train.py --quick    # toy sizes, seconds: only a smoke test

Every rank trains three copies of one model in turn, step by step, with DDP and with FSDP2: by the
loop of code/train.py, by the script's own methods; by Lightning's Trainer; and by a bare loop
(see floor). All ranks start a step together, so each contender meets the same load; the order is
reversed from round to round. Nobody outside can call a step of the Trainer, so the others have
their turns while it waits for its next batch. A step lasts from there to the next question for a
batch, until the slowest rank is done.

Both sides load the same windows in the same order with a DataLoader without workers, train in
float32 with AdamW, cut the gradient's norm to 1, and in every step average the loss over all ranks,
write a line to a file, and ask all ranks whether one was told to stop. By default the script writes
and asks at every tenth step, and the Trainer asks at every one and writes at every fiftieth. Bars,
validation and checkpoints are off. The losses of all three are equal, or the run fails.

What a loop adds to a step hardly grows with the model: it shows in the second one, "nano".

ratio: median step of ours over median step of theirs in each repeat of a few rounds; the median
and the quartiles over the repeats are reported.

floor: the share of the physical floor that ours reaches, median step of the bare loop over median
step of ours. The bare loop trains the same model, with batches that are there already: forward,
backward, torch's own DDP or fully_shard, clip_grad_norm_ and AdamW. All else is the loop's: loader,
micro-batches, loss scaler, mean of the loss, log, the question whether to stop. The share is the
median over the repeats; other work on the machine can lift it above 1.

Links are the machine's own: both sides send over the default group, which no slow link replaces.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import (
    WARM_UP,
    Step,
    Times,
    describe_model,
    gpu_model,
    make_row,
    make_run_options,
    parse_options,
    print_progress,
    print_rows,
    run_turns,
    select_slowest_rank,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from shardlab import ranks
from shardlab.common.text import TokenWindows, load_splits
from shardlab.gpt.model import GPT, PRESETS, Config, loss
from shardlab.train import core, take_home
from shardlab.train.take_home import Options, Training

STRATEGIES = ("ddp", "fsdp2")
RATE, CLIP = 1e-3, 1.0
APART = 1e-4  # float32: contenders divide the mean over ranks at different points
Batches = Iterator[tuple[Tensor, Tensor]]
Contender = tuple[Step, list[Tensor]]  # its step, and the losses of its steps


def make_batches(config: Config, batch: int) -> Batches:
    """Return this rank's share of the text, loaded as the script loads it, in an endless loop."""
    windows = TokenWindows(config.seq, load_splits()[0])
    order = DistributedSampler(windows, seed=0, drop_last=True)
    loader = DataLoader(windows, batch, sampler=order, generator=torch.Generator(), drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def build_parallel_model(config: Config, strategy: str) -> nn.Module:
    torch.manual_seed(0)
    return take_home.parallelize_model(GPT(config), Options(strategy=strategy), ranks.device())


def script_step(config: Config, strategy: str, batch: int, steps: int, folder: Path) -> Contender:
    """Return a step of code/train.py: the body of its loop with a report in every step."""
    losses: list[Tensor] = []
    loader, world = make_batches(config, batch), dist.get_world_size()
    how = {"lr": RATE, "clip": CLIP, "batch": batch * world, "micro": batch, "steps": steps}
    options = Options(folder=str(folder), strategy=strategy, seq=config.seq, **how)
    training = Training(options, build_parallel_model(config, strategy), ranks.device())

    def step() -> None:
        value, norm = training.step(*next(loader))
        losses.append(value)
        training.log_metrics(value, norm)
        assert not training.stopped

    return step, losses


def make_bare_step(config: Config, strategy: str, batch: int, steps: int) -> Contender:
    """Return a step with the mathematically required operations, and nothing else."""
    device, losses = ranks.device(), []
    model = build_parallel_model(config, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loaded = itertools.islice(make_batches(config, batch), steps)
    ready = iter([(tokens.to(device), targets.to(device)) for tokens, targets in loaded])

    def step() -> None:
        tokens, targets = next(ready)
        optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(value.detach())

    return step, losses


class InTurn:
    """Loader for Lightning that runs the other contenders' turns before each batch."""

    def __init__(self, batches: Batches, taken: Iterator[None], steps: int):
        self.batches, self.taken, self.steps = batches, taken, steps

    def __len__(self) -> int:
        """Return one more than the number of steps: another request ends the last step."""
        return self.steps + 1

    def __iter__(self) -> Batches:
        for _ in self.taken:
            yield next(self.batches)


def run_lightning(config: Config, strategy: str, loader: InTurn, folder: Path) -> None:
    """Train with Lightning on this rank, on all of the loader's batches, and log to `folder`."""
    lightning = import_lightning()
    device, size = ranks.device(), dist.get_world_size()
    plan = lightning.DDP() if strategy == "ddp" else lightning.ModelParallelStrategy(size, 1)
    # Ranks may share a GPU, which `devices=…` does not allow.
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    plan.parallel_devices = [
        torch.device("cuda", rank % gpus) if gpus else device for rank in range(size)
    ]
    trainer = lightning.L.Trainer(
        strategy=plan,
        plugins=[lightning.ExistingRanks()],
        max_epochs=1,
        gradient_clip_val=CLIP,
        logger=lightning.L.loggers.CSVLogger(folder, "", "", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        use_distributed_sampler=False,  # the loader has the script's sampler
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(lightning.LitGPT(strategy == "fsdp2", config), loader)


def import_lightning() -> Any:
    """Import the course's module for Lightning without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from shardlab.trainers import existing_ranks
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    return existing_ranks


def time_steps(config: Config, strategy: str, batch: int, rounds: int, folder: Path) -> Times:
    """Return this rank's seconds of `rounds` steps of each contender."""
    steps = WARM_UP + rounds
    ours, our_losses = script_step(config, strategy, batch, steps, folder)
    floor, bare_losses = make_bare_step(config, strategy, batch, steps)
    contenders = {"ours": ours, "theirs": None, "bare": floor}
    times: Times = {name: [] for name in contenders}
    taken = run_turns(contenders, rounds, ranks.device(), {}, times)
    run_lightning(config, strategy, InTurn(make_batches(config, batch), taken, steps), folder)
    means = [core.average_over_ranks(value).item() for value in bare_losses]
    if dist.get_rank() == 0:
        lines = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
        found = torch.tensor([[float(line["loss"]) for line in lines], our_losses, means])
        assert found.shape == (3, steps), found.shape
        if ranks.device().type == "cuda":
            found = found[:, :3]  # atomics add in any order, and the differences grow
        gap = (found - found[0]).abs().max().item()
        assert gap < APART, f"losses differ by {gap}"
    return times


def list_cases(kind: str, size: int, quick: bool) -> list[tuple[str, int, int]]:
    """Return (model, sequences of a rank, rounds) of each case on a link."""
    if quick:
        return [("nano", 1, 1)]
    return [(gpu_model(size), 4, 4) if kind == "gpu" else ("mini", 2, 8), ("nano", 2, 20)]


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_options(__doc__, arguments, ("loopback", "gpu"))
    if importlib.util.find_spec("pytorch_lightning") is None:
        print("no rows: pytorch-lightning is not installed here", file=sys.stderr)
        chosen.links = []
    else:
        import_lightning()  # once, and not in every rank
    rows = []
    for kind in chosen.links:
        for size in chosen.ranks:
            for (name, batch, rounds), strategy in itertools.product(
                list_cases(kind, size, chosen.quick), STRATEGIES
            ):
                print_progress(strategy, name, kind, f"{size} ranks")
                config = PRESETS[name]
                with tempfile.TemporaryDirectory() as folder:
                    how = config, strategy, batch, rounds * chosen.repeats, Path(folder)
                    times = select_slowest_rank(
                        ranks.run(time_steps, size, *how, **make_run_options(kind))
                    )
                model = describe_model(name, config)
                case = f"{strategy}: {model}, {batch * config.seq} tokens a rank"
                given = case, "Lightning's Trainer", size, kind, times, chosen.repeats
                rows.append(make_row(*given, lambda middle: middle["bare"]))
    print_rows(rows, chosen.json)


if __name__ == "__main__":
    main()
