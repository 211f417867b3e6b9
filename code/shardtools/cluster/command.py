"""Start, watch and debug jobs on several nodes.

python -m shardlab cluster up                 # a small Slurm on this machine
python -m shardlab cluster status
python -m shardlab cluster down
python -m shardlab cluster run --help         # start and restart the ranks of a node
python -m shardlab cluster watch --help       # sample the GPU, CPU and memory of each rank
python -m shardlab cluster hang --help        # name the rank that a hanging job waits for
python -m shardlab cluster files --help       # adapt the course's batch files to your site
"""

from __future__ import annotations

import argparse
from importlib import import_module

from shardtools import options

# Only the module of the named subcommand is imported.
SUBCOMMANDS = {
    **dict.fromkeys(("up", "status", "down"), "cluster.slurm"),
    "run": "commands.elastic",
    "watch": "cluster.watch.sample",
    "hang": "cluster.watch.hang",
    "files": "cluster.site",
}


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `cluster` to the command line."""
    parser = options.add_parser(commands, "cluster", __doc__)
    parser.add_argument("part", nargs="?", default="", help=", ".join(SUBCOMMANDS), metavar="PART")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its options: PART --help")
    parser.set_defaults(command=_main)


def _main(args: argparse.Namespace) -> int:
    if args.part not in SUBCOMMANDS:
        near = options.suggest_nearest(args.part, SUBCOMMANDS)
        raise ValueError(f"part={args.part!r}: must be one of {', '.join(SUBCOMMANDS)}{near}")
    parser = options.Parser(prog="python -m shardlab cluster")
    module = import_module(f"shardtools.{SUBCOMMANDS[args.part]}")
    getattr(module, f"add_{args.part}")(parser.add_subparsers())
    part = parser.parse_args([args.part, *args.rest])
    return part.command(part)
