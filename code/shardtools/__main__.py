"""The course's command line.

    python -m shardlab                # lists the commands
    python -m shardlab record --help

A module with a command defines `add_command(commands)`, which adds its parser and sets `command` to
a function of the parsed options that returns the exit status. Name the module here, with its line
in the list of commands. Only the named command's module is imported; the list imports none, so it
needs no command's packages.
"""

from __future__ import annotations

import importlib
import os
import sys

from shardtools import options

COMMANDS = {
    "record": ("shardcourse.build", "execute lessons and keep their outputs in book/recorded/"),
    "pairs": ("shardcourse.build.pairs", "write code/lessons/*.py and tables of book/topics.yml"),
    "lab": ("shardcourse.build.lab", "write the lessons as notebooks into lab/"),
    "gpu": ("shardcourse.build.gpu", "run all tests, recordings and benchmarks that need a GPU"),
    "memory": ("shardtools.commands.memory", "predict the memory of one rank of a training job"),
    "schedule": ("shardtools.commands.schedule", "simulate and draw the schedule of a pipeline"),
    "mesh": ("shardtools.commands.mesh", "train on a mesh of ranks and compare with one process"),
    "steps": ("shardtools.steps", "check a script against the steps from one GPU to many"),
    "grade": ("shardtools.grade.command", "start and test a parallel engine of your own"),
    "parity": ("shardtools.parity.command", "compare a parallel training script with a plain one"),
    "strategy": ("shardtools.strategy.command", "choose a layout by predicted time and memory"),
    "cluster": ("shardtools.cluster.command", "start, watch and debug jobs on several nodes"),
    "doctor": ("shardtools.cluster.doctor", "check this machine, or all hosts of a job"),
}
PROGRAM = "python -m shardlab"
PIP_NAMES = {"pynvml": "nvidia-ml-py", "yaml": "pyyaml"}  # modules that pip knows by another name


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (or the command line) names; return the exit status."""
    options.escape_unencodable()
    try:
        try:
            status = _run_command(sys.argv[1:] if arguments is None else arguments)
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
        package = PIP_NAMES.get(name, name)
        hint = f"{sys.executable} -m pip install {package}"
        return _print_error(f"package {package} is missing: {hint}", 2)
    except OSError as error:
        return _print_error(str(error), 1)
    except ValueError as error:  # the user's mistake: the message is enough
        return _print_error(str(error), 2)


def _run_command(arguments: list[str]) -> int:
    """Run the command that `arguments` begins with; return its exit status."""
    parser = options.Parser(prog=PROGRAM, description="One Model, Many GPUs: the course's tools.")
    commands = parser.add_subparsers(title="commands", metavar="command")
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        importlib.import_module(COMMANDS[name][0]).add_command(commands)
    elif name and not name.startswith("-"):
        suggestion = options.suggest_nearest(name, COMMANDS)
        raise ValueError(f"command={name!r}: must be one of {', '.join(COMMANDS)}{suggestion}")
    else:
        for name, (_, words) in COMMANDS.items():
            commands.add_parser(name, help=words)
    args = parser.parse_args(arguments)
    if not hasattr(args, "command"):
        parser.print_help()
        return 0
    return args.command(args)


def _print_error(message: str, status: int) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
