"""Comparison of two scripts: `watch(model, optimizer)` in each, and a folder for results.

    python -m shardlab parity plain.py -- torchrun --nproc-per-node 2 parallel.py

The command starts the plain script, once and with noise, and then the command behind `--`. An
environment variable tells `watch` its role; without it, `watch` does nothing. Each process writes
its results to the folder at its end.
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
from .hooks import Watch, strip_wrappers
from .noise import NoiseMeter, combine_draws
from .programs import build_report, check_plain_run
from .record import INDEX_FILE, Record, create_folder
from .report import Report

ROLE_VARIABLE = "SHARDLAB_PARITY"  # of a process: its role, a colon, the folder
PLAIN, NOISE, PARALLEL = "plain", "noise", "parallel"


def watch(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    rename: Callable[[str], str] = strip_wrappers,
) -> Any:
    """Watch a script's model, or this rank's parts of one, for `python -m shardlab parity`.

    Call it before the first step, in both scripts. Returns the model; otherwise does nothing.
    """
    role, _, name = os.environ.get(ROLE_VARIABLE, "").partition(":")
    if not role:
        return model
    folder, (role, _, seed) = Path(name), role.partition("-")
    record = Record(folder) if role == PLAIN else Record.load(folder)
    if role == PARALLEL:
        rank, size = _get_rank_and_size()
        sink: Any = Matcher(record, rank, size)
    else:
        sink = record if role == PLAIN else NoiseMeter(record)
    watching = Watch(sink, int(seed) if role == NOISE else None)
    watching(model, optimizer, rename)

    def write_results() -> None:
        watching.close()
        if role == PLAIN:
            record.save()
        elif role == NOISE:
            torch.save(sink.get_differences(), folder / f"noise-{seed}.pt")
        else:
            torch.save(sink, folder / f"rank-{sink.rank}.pt")

    atexit.register(write_results)
    return model


def _get_rank_and_size() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = launcher.read_launch_info(os.environ)
    return (place.rank, place.world_size) if place else (0, 1)


def compare_scripts(plain: list[str], parallel: list[str], folder: Path, draws: int) -> Report:
    """Run a plain script, with its arguments, and a parallel one's whole command; compare them.

    Raises ValueError if one of them fails or cannot be compared (see `check`), and for a used
    folder.
    """
    folder = create_folder(folder)
    plain = [sys.executable, *plain]
    _run_script(plain, PLAIN, folder)
    if not (folder / INDEX_FILE).exists():
        raise ValueError("plain: must call parity.watch(model, optimizer) once; it never did")
    record = Record.load(folder)
    for seed in range(1, draws + 1):
        _run_script(plain, f"{NOISE}-{seed}", folder)
    files = (folder / f"noise-{n}.pt" for n in range(1, draws + 1))
    record.noise = combine_draws(record, [torch.load(file, weights_only=False) for file in files])
    check_plain_run(record)
    record.save()
    _run_script(parallel, PARALLEL, folder)
    files = sorted(folder.glob("rank-*.pt"), key=lambda file: int(file.stem.partition("-")[2]))
    matchers = [torch.load(file, weights_only=False) for file in files]
    if not matchers or len(matchers) != matchers[0].ranks:
        raise ValueError(
            "parallel: must call parity.watch(model, optimizer) once on each rank; "
            f"{len(matchers)} ranks did"
        )
    return build_report(record, matchers)


def _run_script(command: list[str], role: str, folder: Path) -> None:
    environment = {**os.environ, ROLE_VARIABLE: f"{role}:{folder}"}
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace")  # fmt: skip
    except OSError as error:
        raise ValueError(f"{command[0]}: cannot be started: {error.strerror}") from None
    (folder / f"{role}.txt").write_text(done.stdout, "utf-8")
    if done.returncode:
        sys.stderr.write(done.stdout)
        who = "plain" if role != PARALLEL else "parallel"
        raise ValueError(
            f"{who}: {' '.join(command)[:200]!r} ended with status {done.returncode}; see "
            "its output above"
        )
