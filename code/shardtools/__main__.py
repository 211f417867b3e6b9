"""The course's command line.

    python -m shardlab                # lists the commands
    python -m shardlab record --help

A module with a command defines `add_command(commands)`, which adds its parser and sets `command` to
a function of the parsed options that returns the exit status. Name the module here, with its words
in the list of commands. Only the named command's module is imported, and the list imports none: it
needs no command's packages.
"""

from __future__ import annotations

import importlib
import os
import sys

from shardtools import options

COMMANDS = {
    "record": ("shardcourse.build", "execute lessons, and keep their outputs in book/recorded/"),
    "pairs": ("shardcourse.build.pairs", "write code/lessons/*.py, and tables of book/topics.yml"),
    "lab": ("shardcourse.build.lab", "write the lessons as notebooks into lab/"),
    "gpu": ("shardcourse.build.gpu", "test, record and measure everything that needs a GPU"),
    "memory": ("shardtools.commands.memory", "what one rank of a training job holds, in bytes"),
    "schedule": ("shardtools.commands.schedule", "who works when in a pipeline, and a picture"),
    "mesh": ("shardtools.commands.mesh", "train on any mesh of ranks, beside one process"),
    "steps": ("shardtools.steps", "which of seventeen steps to many GPUs your script has made"),
    "grade": ("shardtools.grade.command", "an engine of your own: written empty, and graded"),
    "parity": (
        "shardtools.parity.command",
        "whether a parallel script computes as a plain one does",
    ),
    "strategy": ("shardtools.strategy.command", "which layout: seconds and bytes of a step"),
    "cluster": ("shardtools.cluster.command", "jobs on nodes: up, status, down, run, watch, hang"),
    "doctor": ("shardtools.cluster.doctor", "whether this machine, or a job's hosts, are fit"),
}
PROGRAM = "python -m shardlab"
PACKAGES = {"pynvml": "nvidia-ml-py", "yaml": "pyyaml"}  # modules that pip knows by another name


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (or the command line) names; return the exit status."""
    options.any_encoding()
    try:
        try:
            status = _run(sys.argv[1:] if arguments is None else arguments)
        except SystemExit as end:  # argparse's own way out
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        # Discard buffered output, which Python would try to write at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "shardlab"):
            raise
        package = PACKAGES.get(name, name)
        return _failed(f"this Python lacks {name}: {sys.executable} -m pip install {package}", 2)
    except OSError as error:
        return _failed(str(error), 1)
    except ValueError as error:  # the user's mistake: the message is enough
        return _failed(str(error), 2)


def _run(given: list[str]) -> int:
    """Run the command that `given` names first, with its arguments; return its exit status."""
    parser = options.Parser(prog=PROGRAM, description="One Model, Many GPUs: the course's tools.")
    commands = parser.add_subparsers(title="commands", metavar="command")
    named = given[0] if given else ""
    if named in COMMANDS:
        importlib.import_module(COMMANDS[named][0]).add_command(commands)
    elif named and not named.startswith("-"):
        near = options.nearest(named, COMMANDS)
        raise ValueError(f"{named!r}: no such command{near}; there are {', '.join(COMMANDS)}")
    else:
        for name, (_, words) in COMMANDS.items():
            commands.add_parser(name, help=words)
    chosen = parser.parse_args(given)
    if not hasattr(chosen, "command"):
        parser.print_help()
        return 0
    return chosen.command(chosen)


def _failed(words: str, status: int) -> int:
    print(f"{PROGRAM}: {words}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
