"""Start the ranks of this node, and restart all ranks when one fails (as torchrun does).

    python -m shardlab cluster run --nodes 2 --ranks 4 --at node1:29400 train.py --steps 100
    python -m shardlab cluster run --at 127.0.0.1:29400 --ranks 2 --logs logs train.py --steps 100
    python -m shardlab cluster run --at 127.0.0.1:29400 -- -m package.module --steps 100

Run it on each node: the agents meet at --at. All arguments after the script are passed to it.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from shardlab.elastic.job import Job
from shardtools import options


def add_run(commands: argparse._SubParsersAction) -> None:
    """Add `run` to the subcommands of `python -m shardlab cluster`."""
    parser = options.add_parser(commands, "run", __doc__)
    add = partial(options.add_option, parser)
    add("at", "address at which the agents meet: one of the nodes, and a port", "HOST:PORT")
    add("ranks", "number of ranks on this node (1)", "N", int)
    add("nodes", "number of nodes, or the least and the largest (1)", "LEAST:MOST", _parse_nodes)
    add("job", "name of the job: agents of other jobs are refused (job)", "NAME")
    add("restarts", "how often all ranks start again after a failure (3)", "N", int)
    add("patience", "seconds without a heartbeat after which an agent is dropped (5)", "S", float)
    add("last-call", "seconds to wait for more nodes than the least number (2)", "S", float)
    add("join", "seconds to wait for the least number of nodes (600)", "S", float)
    add("grace", "seconds from SIGTERM to SIGKILL (10)", "S", float)
    add("logs", "folder for each rank's output (by default the agent's own output)", "DIR")
    parser.add_argument("script", help="script of every rank, and its arguments", nargs="...")
    parser.set_defaults(command=_main)


def _main(args: argparse.Namespace) -> int:
    job = build_job(args)
    if job.logs:
        options.make_folder("logs", job.logs)
    from shardlab.elastic import core  # imported late: torch takes seconds to load

    return core.run(job, partial(print, flush=True))


def build_job(args: argparse.Namespace) -> Job:
    """Build the job that the options describe. Raises ValueError for a bad one."""
    script = [*args.script]
    if script[:1] == ["--"]:
        script.pop(0)
    if not script:
        raise ValueError("script: missing; must be a file, or -- -m MODULE")
    if script[0] != "-m" and not os.path.isfile(script[0]):
        raise ValueError(f"script={script[0]!r}: must be a file that exists")
    given = {"at": ""} | options.collect_options(args, Job) | {"command": (sys.executable, *script)}
    if isinstance(nodes := given.get("nodes"), str):
        raise ValueError(f"nodes={nodes!r}: must be LEAST:MOST, or one number")
    if args.job is not None:
        given["name"] = args.job
    if "logs" in given:
        given["logs"] = options.parse_path("logs", given["logs"])
    return Job(**given)


def _parse_nodes(given: str) -> tuple[int, int]:
    least, _, most = given.partition(":")
    return int(least), int(most or least)
