"""An engine of your own, in five files, graded on real ranks.

    python -m shardlab grade --start my_engine    # writes the files, with signatures alone
    python -m shardlab grade my_engine

Each part is judged by cases: some ranks train with your file, and what they have and send is held
against one process. The visible cases are always the same, the hidden ones drawn from a seed.
What fails is named, with what it looks like. book/project.md says how it is used in a course.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shardlab.common.arguments import MOST
from shardtools import options

from . import core, data_parallel, experts, pipeline, report, tensor_parallel, zero

MODULES = data_parallel, zero, tensor_parallel, pipeline, experts
PARTS = {module.PART.name: module.PART for module in MODULES}
EMPTY = Path(__file__).parent / "start"


def start(folder: Path) -> list[str]:
    """Write the files that are not there yet; say of each what was done."""
    said = []
    for name in PARTS:
        path = folder / f"{name}.py"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write((EMPTY / path.name).read_text("utf-8"))
            said.append(f"wrote {path}")
        except FileExistsError:
            said.append(f"kept {path}, which is there already")
    return said


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `grade` to the command line."""
    parser = options.command(commands, "grade", __doc__)
    parser.add_argument("folder", help="where the five files are")
    parser.add_argument("--start", action="store_true", help="write those that are not there yet")
    options.add(parser, "part", f"one part alone: {', '.join(PARTS)}", "NAME")
    options.add(parser, "seed", "of the hidden cases, a whole number; by default 0", "N")
    options.add(parser, "json", "write all results there, as JSON", "FILE")
    options.add(parser, "junit", "write all results there, as JUnit's XML", "FILE")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    named = {n: v for n, v in vars(chosen).items() if n in ("part", "seed", "json", "junit")}
    given = [name for name, value in named.items() if value is not None]
    if chosen.start:
        options.apart(given, named, "with --start: allowed is the folder alone")
        print(*start(options.folder("folder", chosen.folder)), sep="\n")
        return 0
    if chosen.part is not None and chosen.part not in PARTS:
        near = options.nearest(chosen.part, PARTS)
        raise ValueError(f"part={chosen.part!r}: allowed are {', '.join(PARTS)}{near}")
    seed = 0 if chosen.seed is None else options.whole("seed", chosen.seed, 0, MOST)
    folder = options.place("folder", chosen.folder)
    if not folder.is_dir():
        raise ValueError(f"folder={chosen.folder!r}: allowed are folders; --start makes one")
    outputs = {"json": report.as_json, "junit": report.as_junit}
    for name in outputs.keys() & set(given):
        options.written(name, named[name])
    grades = []
    for name in PARTS if chosen.part is None else [chosen.part]:
        grades.append(core.grade(PARTS[name], (folder / f"{name}.py").resolve(), seed))
        print(*report.lines(grades[-1]), sep="\n", flush=True)
    for name, text in outputs.items():
        if name in given:
            options.written(name, named[name], text(grades))
    passed, total = sum(g.passed for g in grades), sum(len(g.results) for g in grades)
    print(f"{passed} of {total} cases pass")
    return 0 if passed == total else 1
