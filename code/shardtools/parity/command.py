"""`python -m shardlab parity`: check that a parallel script computes what a plain one does."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from shardtools import options

from .noise import DRAWS
from .scripts import compared

EPILOG = """\
both scripts say parity.watch(model, optimizer) once, before their first step, and take a few
steps on the same batches from the same weights; nothing else of them changes.

  python -m shardlab parity plain.py -- torchrun --nproc-per-node 2 parallel.py

ends with 0 where they are equal, with 1 where they are not, and with 2 where they cannot be
compared."""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `parity` to the command line."""
    parser = options.command(
        commands, "parity", "Is a parallel program the same computation as its plain one?"
    )
    parser.epilog = EPILOG
    parser.usage = (
        f"{parser.prog} [options] plain.py [its arguments] -- command of the parallel one"
    )
    options.add(parser, "draws", f"plain runs with noise, to see what rounding does ({DRAWS})", "N")
    options.add(parser, "folder", "keep there what was computed, and what was printed", "FOLDER")
    parser.add_argument("scripts", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(command=run)


def run(given: argparse.Namespace) -> int:
    """Compare two scripts; return the exit status."""
    draws = DRAWS if given.draws is None else options.whole("draws", given.draws, 1, 100)
    words = given.scripts
    plain = words[: words.index("--")] if "--" in words else words
    parallel = words[len(plain) + 1 :]
    if not plain or not parallel or plain[0].startswith("-"):
        raise ValueError(
            f"scripts={' '.join(words)!r}: needed are a plain script, --, and the command that "
            "starts the parallel one, as in plain.py -- torchrun --nproc-per-node 2 parallel.py"
        )
    if not Path(plain[0]).is_file():
        raise ValueError(f"plain={plain[0]!r}: there is no such script; needed is a Python file")
    with tempfile.TemporaryDirectory(prefix="parity-") as own:
        folder = Path(own) if given.folder is None else options.folder("folder", given.folder)
        report = compared(plain, parallel, folder, draws)
    print(report)
    return 0 if report.equal else 1
