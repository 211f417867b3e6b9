"""The course's command line.

    python -m shardlab                # what there is
    python -m shardlab record --help

A module with something to offer brings `add_command(commands)`, which adds its parser and sets
`command` to a function of the parsed options that returns the exit status. Name it here.
"""

from __future__ import annotations

import argparse
import importlib
import sys

MODULES = (
    "shardlab.record",
    "shardlab.record.pairs",
    "shardlab.memory.command",
    "shardlab.pipeline.command",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (or the command line) names; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m shardlab", description="One Model, Many GPUs: the course's tools."
    )
    commands = parser.add_subparsers(title="commands", metavar="command")
    for module in MODULES:
        importlib.import_module(module).add_command(commands)
    options = parser.parse_args(arguments)
    if not hasattr(options, "command"):
        parser.print_help()
        return 0
    try:
        return options.command(options)
    except ValueError as error:  # the user's mistake: the message is enough
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
