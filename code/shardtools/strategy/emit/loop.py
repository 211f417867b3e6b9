"""The loop of a job: steps, checkpoints, and the signal before the time limit.

A script beside this file says what a step is, and how its engine saves and loads. The loop goes on
from the folder's last checkpoint. At SIGUSR1 or SIGTERM all ranks finish a step, save and end. Each
step is a line of metrics.jsonl. It needs PyTorch alone: copy it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

SIGNALS = signal.SIGUSR1, signal.SIGTERM
KEPT = 2  # checkpoints; older ones are removed


def run(
    step: Callable[[int], Tensor],
    save: Callable[[Path], object],
    load: Callable[[Path], object],
    arguments: Sequence[str] | None = None,
) -> None:
    """Train as the command line says, on every rank of the default group.

    step: trains once, given the number of steps before it; this rank's mean loss. save and load:
    of a folder, on all ranks. arguments: by default those of the process.
    """
    asked: list[int] = []  # signals, on whichever ranks they come to
    for number in SIGNALS:
        signal.signal(number, lambda got, _: asked.append(got))
    options = parse(arguments)
    folder, first, world = Path(options.folder), dist.get_rank() == 0, dist.get_world_size()
    found: list[Path | None] = [None]
    if first:  # one rank looks, so that all go on from the same one
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".step-*"):  # by a save that was killed
            shutil.rmtree(left)
        found = [None, *saved(folder)][-1:]
    dist.broadcast_object_list(found)
    done, stopped = 0, False
    if newest := found[0]:
        load(newest)
        done = step_of(newest)
    while done < options.steps and not stopped:
        then = time.perf_counter()
        loss = step(done).float()
        told = torch.stack([loss, torch.full_like(loss, len(asked))])
        dist.all_reduce(told)  # [2]: so that all ranks stop after the same step
        total, signals = told.tolist()
        done, stopped = done + 1, signals > 0
        line = {"step": done, "time": time.time(), "loss": total / world}
        line["seconds"] = time.perf_counter() - then
        if first:
            with open(folder / "metrics.jsonl", "a") as file:
                print(json.dumps(line), file=file)
        if stopped or done % options.every == 0 or done == options.steps:
            keep(folder / f"step-{done:06d}", save)
    if first:
        print(f"step {done} of {options.steps}", flush=True)


def keep(path: Path, save: Callable[[Path], object]) -> None:
    """Write a checkpoint, each rank its part; the rename makes it count, and old ones go."""
    under_way = path.with_name(f".{path.name}")
    save(under_way)
    dist.barrier()
    if dist.get_rank() == 0:
        under_way.rename(path)
        for old in saved(path.parent)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def saved(folder: Path) -> list[Path]:
    """The complete checkpoints, the newest last."""
    found = (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Steps before this checkpoint, which its name says."""
    return int(path.name.removeprefix("step-"))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--folder", default="run", help="of checkpoints and metrics")
    parser.add_argument("--steps", type=count, default=20, help="in all, those before a stop too")
    parser.add_argument("--every", type=count, default=100, help="steps between checkpoints")
    return parser.parse_args(arguments)


def count(text: str) -> int:
    """A number of the command line, from 1 on."""
    if not re.fullmatch("0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are whole numbers from 1 on")
    return int(text)
