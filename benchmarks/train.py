"""A step of the script to take home beside one of Lightning's Trainer, in one run.

    python benchmarks/train.py            # a table; some eight minutes on two cores
    python benchmarks/train.py --json     # {"rows": [{"case", "against", "ranks", …}, …]}
    python benchmarks/train.py --quick    # toy sizes, seconds: only shows that it runs

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

ratio: median step of ours over median step of theirs, in each repeat, which is a few rounds; of
that the median over the repeats, and the quartiles.

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
import json
import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import WARM_UP, Step, Times, gpu_model, options, ratio, slowest, turns
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from shardlab import ranks
from shardlab.common import show
from shardlab.common.text import Windows, parts
from shardlab.gpt.model import GPT, PRESETS, Config, loss, parameter_count
from shardlab.train import core, take_home
from shardlab.train.take_home import Options, Training

STRATEGIES = ("ddp", "fsdp2")
RATE, CLIP = 1e-3, 1.0
APART = 1e-4  # float32: what differs is when the mean over ranks is divided
Batches = Iterator[tuple[Tensor, Tensor]]
Contender = tuple[Step, list[Tensor]]  # its step, and the losses of those that it made


def batches_of(config: Config, batch: int) -> Batches:
    """On a rank: its share of the text, loaded as the script does, again and again."""
    windows = Windows(config.seq, parts()[0])
    order = DistributedSampler(windows, seed=0, drop_last=True)
    loader = DataLoader(windows, batch, sampler=order, generator=torch.Generator(), drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def spread_over(config: Config, strategy: str) -> nn.Module:
    torch.manual_seed(0)
    return take_home.spread(GPT(config), Options(strategy=strategy), ranks.device())


def by_script(config: Config, strategy: str, batch: int, steps: int, folder: Path) -> Contender:
    """A step of code/train.py: what its loop does with a batch, when it reports every step."""
    losses: list[Tensor] = []
    loader, world = batches_of(config, batch), dist.get_world_size()
    how = {"lr": RATE, "clip": CLIP, "batch": batch * world, "micro": batch, "steps": steps}
    options = Options(folder=str(folder), strategy=strategy, seq=config.seq, **how)
    training = Training(options, spread_over(config, strategy), ranks.device())

    def step() -> None:
        value, norm = training.step(*next(loader))
        losses.append(value)
        training.report(value, norm)
        assert not training.stopped

    return step, losses


def bare(config: Config, strategy: str, batch: int, steps: int) -> Contender:
    """A step that does what the mathematics want, and nothing else."""
    device, losses = ranks.device(), []
    model = spread_over(config, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loaded = itertools.islice(batches_of(config, batch), steps)
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
    """A loader for Lightning: before each batch the others have their turns."""

    def __init__(self, batches: Batches, taken: Iterator[None], steps: int):
        self.batches, self.taken, self.steps = batches, taken, steps

    def __len__(self) -> int:
        """One more than there are: so the Trainer asks once more, and that ends its last step."""
        return self.steps + 1

    def __iter__(self) -> Batches:
        for _ in self.taken:
            yield next(self.batches)


def by_lightning(config: Config, strategy: str, loader: InTurn, folder: Path) -> None:
    """On a rank: train with Lightning on all that the loader has, and log to `folder`."""
    lightning = prepare()
    device, size = ranks.device(), dist.get_world_size()
    plan = lightning.DDP() if strategy == "ddp" else lightning.ModelParallelStrategy(size, 1)
    # Ranks may share a GPU, which devices=… would refuse.
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    plan.parallel_devices = [
        torch.device("cuda", rank % gpus) if gpus else device for rank in range(size)
    ]
    trainer = lightning.L.Trainer(
        strategy=plan,
        plugins=[lightning.TheseRanks()],
        max_epochs=1,
        gradient_clip_val=CLIP,
        logger=lightning.L.loggers.CSVLogger(folder, "", "", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        use_distributed_sampler=False,  # the loader has the script's
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(lightning.LitGPT(strategy == "fsdp2", config), loader)


def prepare() -> Any:
    """The course's module for Lightning, imported quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from shardlab.trainers import beside
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    return beside


def measure(config: Config, strategy: str, batch: int, rounds: int, folder: Path) -> Times:
    """On a rank: seconds of `rounds` steps of each contender."""
    steps = WARM_UP + rounds
    ours, our_losses = by_script(config, strategy, batch, steps, folder)
    floor, bare_losses = bare(config, strategy, batch, steps)
    contenders = {"ours": ours, "theirs": None, "bare": floor}
    times: Times = {name: [] for name in contenders}
    taken = turns(contenders, rounds, ranks.device(), {}, times)
    by_lightning(config, strategy, InTurn(batches_of(config, batch), taken, steps), folder)
    means = [core.averaged(value).item() for value in bare_losses]
    if dist.get_rank() == 0:
        lines = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
        found = torch.tensor([[float(line["loss"]) for line in lines], our_losses, means])
        assert found.shape == (3, steps), found.shape
        if ranks.device().type == "cuda":
            found = found[:, :3]  # its atomics add in any order, and each step magnifies that
        gap = (found - found[0]).abs().max().item()
        assert gap < APART, f"losses differ by {gap}"
    return times


def row(case: str, size: int, kind: str, times: dict[str, Tensor], repeats: int) -> dict[str, Any]:
    """One line of the result, see above; `seconds` and `floor_against` go into the table alone."""
    chunks = {name: seconds.chunk(repeats) for name, seconds in times.items()}
    ratios, fractions = [], []
    for repeat in range(repeats):
        middle = {name: parts[repeat].median().item() for name, parts in chunks.items()}
        ratios.append(middle["ours"] / middle["theirs"])
        fractions.append([middle["bare"] / middle[name] for name in ("ours", "theirs")])
    fraction, fraction_against = (statistics.median(side) for side in zip(*fractions, strict=True))
    return {
        "case": case,
        "against": "Lightning's Trainer",
        "ranks": size,
        "link": kind,
        **ratio(ratios),
        "floor": round(fraction, 4),
        "seconds": round(times["ours"].median().item(), 4),
        "floor_against": round(fraction_against, 4),
    }


def cases(kind: str, size: int, quick: bool) -> list[tuple[str, int, int]]:
    """Model, sequences of a rank, and rounds of what is measured on a link."""
    if quick:
        return [("nano", 1, 1)]
    return [(gpu_model(size), 4, 4) if kind == "gpu" else ("mini", 2, 8), ("nano", 2, 20)]


def main(arguments: list[str] | None = None) -> None:
    chosen = options(__doc__, arguments, ("loopback", "gpu"))
    if importlib.util.find_spec("pytorch_lightning") is None:
        print("no rows: pytorch-lightning is not installed here", file=sys.stderr)
        chosen.links = []
    else:
        prepare()  # once, and not in every rank
    rows = []
    for kind in chosen.links:
        for size in chosen.ranks:
            for (name, batch, rounds), strategy in itertools.product(
                cases(kind, size, chosen.quick), STRATEGIES
            ):
                if sys.stderr.isatty():
                    print(f"{strategy}, {name}, {kind}, {size} ranks …", file=sys.stderr)
                config = PRESETS[name]
                with tempfile.TemporaryDirectory() as folder:
                    how = config, strategy, batch, rounds * chosen.repeats, Path(folder)
                    # What Lightning says of itself is no row.
                    on = {"device": "cuda" if kind == "gpu" else "cpu", "timeout": 900.0}
                    results = ranks.run(measure, size, *how, **on, show=False)
                millions = parameter_count(config) / 1e6
                case = f"{strategy}: {name}, {millions:.1f} M parameters, "
                case += f"{batch * config.seq} tokens a rank"
                rows.append(row(case, size, kind, slowest(results), chosen.repeats))
    if chosen.json:
        hidden = ("seconds", "floor_against")
        print(json.dumps({"rows": [{k: r[k] for k in r if k not in hidden} for r in rows]}))
        return
    head = ["case", "ranks", "link", "ours (s)", "ours / Lightning", "quartiles"]
    head += ["floor reached, ours", "Lightning"]
    show.table(
        [
            [r["case"], r["ranks"], r["link"], f"{r['seconds']:.3f}", f"{r['ratio']:.3f}"]
            + ["{:.3f} to {:.3f}".format(*r["quartiles"])]
            + [f"{r[k] * 100:.0f} %" for k in ("floor", "floor_against")]
            for r in rows
        ],
        head,
    )


if __name__ == "__main__":
    main()
