"""The course's command line.

    python -m shardlab                # what there is
    python -m shardlab record --help

A module with something to offer brings `add_command(commands)`, which adds its parser and sets
`command` to a function of the parsed options that returns the exit status. Name it here. Of a
command that is named, its own module alone is imported: it can say what it lacks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

COMMANDS = {
    "record": "shardlab.record",
    "pairs": "shardlab.record.pairs",
    "lab": "shardlab.record.lab",
    "lesson": "shardlab.record.lesson",
    "gpu": "shardlab.record.gpu",
    "memory": "shardlab.memory.command",
    "schedule": "shardlab.pipeline.command",
    "mesh": "shardlab.mesh.command",
    "strategy": "shardlab.strategy.command",
    "cluster": "shardlab.cluster.command",
    "doctor": "shardlab.cluster.doctor",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (or the command line) names; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m shardlab", description="One Model, Many GPUs: the course's tools."
    )
    commands = parser.add_subparsers(title="commands", metavar="command")
    given = sys.argv[1:] if arguments is None else arguments
    named = COMMANDS.get(given[0]) if given else None
    for module in [named] if named else COMMANDS.values():
        importlib.import_module(module).add_command(commands)
    options = parser.parse_args(given)
    if not hasattr(options, "command"):
        parser.print_help()
        return 0
    try:
        status = options.command(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads this, `head` for one, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:  # the user's mistake: the message is enough
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
