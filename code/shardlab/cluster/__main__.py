"""The agent's command alone, without the course's others: python -m shardlab.cluster run --help"""

from __future__ import annotations

import argparse
import sys

from .job import add_run


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (or the command line) names; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shardlab.cluster")
    add_run(parser.add_subparsers(metavar="command", required=True))
    options = parser.parse_args(arguments)
    try:
        return options.command(options)
    except ValueError as error:  # the user's mistake: the message is enough
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
