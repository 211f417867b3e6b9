"""Grade your own engine: a pytest suite that tests its five files on real ranks.

    python -m shardlab grade --start my_engine    # write the files, with signatures only
    python -m shardlab grade my_engine

Each part has 14 cases. In each, ranks train with your file, and their values, bytes and messages
are compared with those of one process. Four cases are always the same, the others are drawn from a
seed. Exit status: 0 all cases pass, 1 a case fails, 2 a bad option. See also book/project.md.
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
    """Write the start files that the folder lacks."""
    for part in PARTS:
        path = folder / f"{part}.py"
        if path.exists():
            print(f"kept {path}, which exists")
        else:
            shutil.copy(HERE / "start" / path.name, path)
            print(f"wrote {path}")


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `grade` to the command line."""
    parser = options.add_parser(commands, "grade", __doc__)
    parser.add_argument("folder", help="folder of the five files")
    parser.add_argument("--start", action="store_true", help="write files that the folder lacks")
    options.add_option(parser, "part", f"grade only this part: {', '.join(PARTS)}", "NAME")
    options.add_option(parser, "seed", "seed of the hidden cases, a whole number (0)", "N", int)
    options.add_option(parser, "junitxml", "write all results to this file, as pytest does", "FILE")
    parser.set_defaults(command=_main)


def _main(args: argparse.Namespace) -> int:
    if args.start:
        write_start_files(options.make_folder("folder", args.folder))
        return 0
    if args.part is not None and args.part not in PARTS:
        near = options.suggest_nearest(args.part, PARTS)
        raise ValueError(f"part={args.part!r}: must be one of {', '.join(PARTS)}{near}")
    seed = 0 if args.seed is None else args.seed
    check_integer(0, seed=seed)
    folder = options.parse_path("folder", args.folder)
    if not folder.is_dir():
        raise ValueError(f"folder={args.folder!r}: must be a folder that exists; --start makes one")
    import pytest  # imported here: the command's help does not need it

    parts = PARTS if args.part is None else [args.part]
    given = [str(HERE / f"test_{part}.py") for part in parts]
    given += [f"--engine={folder}", f"--seed={seed}", f"--rootdir={HERE}", "-q", "-rN"]
    if args.junitxml is not None:
        options.write_file("junitxml", args.junitxml)
        given.append(f"--junitxml={Path(args.junitxml).resolve()}")
    return int(pytest.main(given))
