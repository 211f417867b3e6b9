"""A grader for an engine of your own: five files, tested on real ranks by a pytest suite.

    python -m shardlab grade --start my_engine    # writes the files, with signatures only
    python -m shardlab grade my_engine

Each part has 14 cases: some ranks train with your file, and their values, bytes and messages are
compared with one process. Four cases are always the same, the others are drawn from a seed.
book/project.md describes how to use the command in a course.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from shardlab.common.arguments import check_integer
from shardtools import options

PARTS = "data_parallel", "zero", "tensor_parallel", "pipeline", "experts"
HERE = Path(__file__).parent


def write_start_files(folder: Path) -> None:
    """Write the five files that are not there yet."""
    for part in PARTS:
        path = folder / f"{part}.py"
        if path.exists():
            print(f"kept {path}, which is there already")
        else:
            shutil.copy(HERE / "start" / path.name, path)
            print(f"wrote {path}")


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `grade` to the command line."""
    parser = options.command(commands, "grade", __doc__)
    parser.add_argument("folder", help="where the five files are")
    parser.add_argument("--start", action="store_true", help="write those that are not there yet")
    options.add(parser, "part", f"one part alone: {', '.join(PARTS)}", "NAME")
    options.add(parser, "seed", "of the hidden cases, a whole number; by default 0", "N", int)
    options.add(parser, "junitxml", "write all results there, as pytest does", "FILE")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    if chosen.start:
        write_start_files(options.folder("folder", chosen.folder))
        return 0
    if chosen.part is not None and chosen.part not in PARTS:
        near = options.nearest(chosen.part, PARTS)
        raise ValueError(f"part={chosen.part!r}: allowed are {', '.join(PARTS)}{near}")
    seed = 0 if chosen.seed is None else chosen.seed
    check_integer(0, seed=seed)
    folder = options.parse_path("folder", chosen.folder)
    if not folder.is_dir():
        raise ValueError(f"folder={chosen.folder!r}: allowed are folders; --start makes one")
    import pytest  # imported here: the command's help does not need it

    parts = PARTS if chosen.part is None else [chosen.part]
    given = [str(HERE / f"test_{part}.py") for part in parts]
    given += [f"--engine={folder}", f"--seed={seed}", f"--rootdir={HERE}", "-q", "-rN"]
    if chosen.junitxml is not None:
        options.written("junitxml", chosen.junitxml)
        given.append(f"--junitxml={Path(chosen.junitxml).resolve()}")
    return int(pytest.main(given))
