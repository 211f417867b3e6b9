"""Two scripts in place of two functions: `watch(model, optimizer)` in each, and a folder.

    python -m shardlab parity plain.py -- torchrun --nproc-per-node 2 parallel.py

The command starts the plain script, once and with noise, and then whatever stands behind `--`. The
environment tells `watch` what it is there for; without it, `watch` does nothing.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlab.common import launcher

from .core import Matcher
from .noise import Noise, largest
from .programs import judged, refuse_other_runs, refuse_plain
from .record import INDEX, Record, claim, own, save
from .recording import Watch, author_names
from .report import Report

ASKED = "SHARDLAB_PARITY"  # what this process is there for: a role, a colon, the folder
PLAIN, NOISE, PARALLEL = "plain", "noise", "parallel"


class Saved:
    """A sink that writes what another one found, after each step."""

    def __init__(self, sink: Any, path: Path):
        self.sink, self.path = sink, own(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sink, name)

    def stepped(self, steps: int) -> None:
        """As `Sink` says."""
        self.sink.stepped(steps)
        self.save()

    def save(self) -> None:
        """Write it whole, or not at all."""
        if isinstance(self.sink, Record):
            self.sink.save()
        else:
            save(self.sink.found() if isinstance(self.sink, Noise) else self.sink, self.path)


def watch(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    rename: Callable[[str], str] = author_names,
) -> Any:
    """Watch a script's model, or this rank's parts of one, for `python -m shardlab parity`.

    Before the first step, in both scripts. Returns the model; started otherwise, does nothing else.
    """
    role, _, folder = os.environ.get(ASKED, "").partition(":")
    if not role:
        return model
    role, _, number = role.partition("-")
    sink, name = _sink(role, Path(folder))
    saved = Saved(sink, Path(folder) / f"{name}{number}.pt")
    watching = Watch(saved, int(number) if role == NOISE else None)
    watching(model, optimizer, rename)
    sink.watched, sink.optimized, sink.fewer = watching.watched, watching.optimized, watching.fewer
    saved.save()
    atexit.register(watching.close)
    return model


def _sink(role: str, folder: Path) -> tuple[Any, str]:
    if role == PLAIN:
        return Record(folder), ""
    record = Record.load(folder)
    if role == NOISE:
        return Noise(record), "noise-"
    place = launcher.place(os.environ)
    rank, size = (place.rank, place.size) if place else (0, 1)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    return Matcher(record, rank, size), f"rank-{rank}"


def compared(plain: list[str], parallel: list[str], folder: Path, draws: int) -> Report:
    """Run a plain script, with its arguments, and a parallel one's whole command; compare them.

    Raises ValueError where one of them fails, or cannot be compared (see `check`), and for a folder
    that holds other files than those of an earlier comparison.
    """
    with claim(folder):
        return _compared([sys.executable, *plain], parallel, folder, draws)


def _compared(plain: list[str], parallel: list[str], folder: Path, draws: int) -> Report:
    _run(plain, PLAIN, folder)
    if not (folder / INDEX).exists():
        raise ValueError(
            "plain: it never called parity.watch(model, optimizer); needed is one call"
        )
    record = Record.load(folder)
    refuse_plain(record)
    for number in range(1, draws + 1):
        _run(plain, f"{NOISE}-{number}", folder)
    found = [torch.load(folder / f"noise-{n}.pt", weights_only=False) for n in range(1, draws + 1)]
    record.noise = largest(record, found)
    refuse_other_runs(record)
    record.save()
    _run(parallel, PARALLEL, folder)
    files = sorted(folder.glob("rank-*.pt"), key=lambda file: int(file.stem.partition("-")[2]))
    matchers = [torch.load(file, weights_only=False) for file in files]
    if not matchers or len(matchers) != matchers[0].ranks:
        raise ValueError(
            f"parallel: {len(matchers)} ranks called parity.watch(model, optimizer); needed is "
            "one call on each"
        )
    return judged(record, matchers)


def _run(command: list[str], role: str, folder: Path) -> None:
    environment = {**os.environ, ASKED: f"{role}:{folder.resolve()}"}
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace")  # fmt: skip
    except OSError as error:
        raise ValueError(f"{command[0]}: {error.strerror}; needed is a command that runs") from None
    own(folder / f"{role}.txt").write_text(done.stdout, "utf-8")
    if done.returncode:
        sys.stderr.write(done.stdout)
        who = "plain" if role != PARALLEL else "parallel"
        raise ValueError(
            f"{who}: {' '.join(command)[:200]!r} ended with status {done.returncode}; what it "
            "printed stands above"
        )
