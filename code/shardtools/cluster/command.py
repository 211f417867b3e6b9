"""`python -m shardlab cluster`: the commands of the lessons on clusters.

    python -m shardlab cluster up                 # a small Slurm on this machine
    python -m shardlab cluster status
    python -m shardlab cluster down
    python -m shardlab cluster run --help         # an agent: starts and restarts a node's ranks
    python -m shardlab cluster watch --help       # what each rank of a job uses
    python -m shardlab cluster hang --help        # which rank a hanging job waits for
    python -m shardlab cluster files --help       # the course's batch files, made for your site

Only the module of the named command is imported.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from shardtools import options

# Each part's name on the command line, and the module that adds it.
PARTS = {
    **dict.fromkeys(("up", "status", "down"), "cluster.slurm"),
    "run": "commands.elastic",
    "watch": "cluster.watch.sample",
    "hang": "cluster.watch.hang",
    "files": "cluster.site",
}


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `cluster` to the command line."""
    parser = options.command(commands, "cluster", __doc__)
    parser.add_argument("part", nargs="?", default="", help=", ".join(PARTS), metavar="PART")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="what it takes: PART --help")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    if chosen.part not in PARTS:
        near = options.nearest(chosen.part, PARTS)
        raise ValueError(f"part={chosen.part!r}: allowed are {', '.join(PARTS)}{near}")
    parser = options.Parser(prog="python -m shardlab cluster")
    module = import_module(f"shardtools.{PARTS[chosen.part]}")
    getattr(module, f"add_{chosen.part}")(parser.add_subparsers())
    part = parser.parse_args([chosen.part, *chosen.rest])
    return part.command(part)
