"""`python -m shardlab parity`: check that a parallel script computes what a plain one does."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from shardtools import options

from .noise import DRAWS
from .scripts import compare_scripts

EPILOG = """\
Call parity.watch(model, optimizer) once in both scripts, before the first step, and take a few
steps on the same batches from the same weights; change nothing else.

  python -m shardlab parity plain.py -- torchrun --nproc-per-node 2 parallel.py

Exit status: 0 if they are equal, 1 if they are not, 2 if they cannot be compared."""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `parity` to the command line."""
    parser = options.add_parser(
        commands, "parity", "Check that a parallel script computes what its plain version computes."
    )
    parser.epilog = EPILOG
    parser.usage = (
        f"{parser.prog} [options] plain.py [arguments] -- command that starts the parallel script"
    )
    options.add_option(
        parser,
        "draws",
        f"runs of the plain script with noise, to measure rounding (default: {DRAWS})",
        "N",
    )
    options.add_option(
        parser, "folder", "new or empty folder that keeps all tensors and output", "FOLDER"
    )
    parser.add_argument("scripts", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(command=run)


def run(given: argparse.Namespace) -> int:
    """Compare two scripts; return the exit status."""
    draws = DRAWS if given.draws is None else options.parse_whole("draws", given.draws, 1, 100)
    words = given.scripts
    plain = words[: words.index("--")] if "--" in words else words
    parallel = words[len(plain) + 1 :]
    if not plain or not parallel or plain[0].startswith("-"):
        raise ValueError(
            f"scripts={' '.join(words)!r}: must be a plain script, --, and the command that starts "
            "the parallel script, as in plain.py -- torchrun --nproc-per-node 2 parallel.py"
        )
    if not Path(plain[0]).is_file():
        raise ValueError(f"plain={plain[0]!r}: must be an existing Python script")
    with tempfile.TemporaryDirectory(prefix="parity-") as own:
        folder = Path(own) if given.folder is None else options.make_folder("folder", given.folder)
        report = compare_scripts(plain, parallel, folder, draws)
    print(report)
    return 0 if report.is_equal else 1
