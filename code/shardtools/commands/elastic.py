"""`python -m shardlab cluster run`: run this node's agent, which starts and restarts ranks.

    python -m shardlab cluster run --nodes 2 --ranks 4 --at node1:29400 train.py --steps 100
    python -m shardlab cluster run --at 127.0.0.1:29400 --ranks 2 --logs logs train.py --steps 100
    python -m shardlab cluster run --at 127.0.0.1:29400 -- -m package.module --steps 100

All arguments after the script are passed to it unchanged, even if they look like options.
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
    parser = options.command(commands, "run", __doc__)
    add = partial(options.add, parser)
    add("at", "where the agents meet: a host that is one of the nodes, and a port", "HOST:PORT")
    add("ranks", "on this node (1)", "N", int)
    add("nodes", "how many, or how many at least and at most (1)", "LEAST:MOST", _nodes)
    add("job", "its name: agents of another job are turned away (job)", "NAME")
    add("restarts", "of all ranks after one has failed (3)", "N", int)
    add("patience", "seconds until a silent agent is left out (5)", "S", float)
    add("last-call", "seconds for more nodes, when the least number is there (2)", "S", float)
    add("join", "seconds for the least number of nodes to come (600)", "S", float)
    add("grace", "seconds between SIGTERM and SIGKILL (10)", "S", float)
    add("logs", "folder for what each rank writes (to the agent's own output)", "DIR")
    parser.add_argument("script", help="what every rank runs, and its arguments", nargs="...")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    job = told(chosen)
    if job.logs:
        options.folder("logs", job.logs)
    from shardlab.elastic import core  # imported late: torch takes seconds to load

    return core.run(job, partial(print, flush=True))


def told(chosen: argparse.Namespace) -> Job:
    """Return the job that the options, all of them text, describe. Raises ValueError."""
    script = [*chosen.script]
    if script[:1] == ["--"]:
        script.pop(0)
    if not script:
        raise ValueError("script: missing; allowed are a file, or -- -m MODULE")
    if script[0] != "-m" and not os.path.isfile(script[0]):
        raise ValueError(f"script={script[0]!r}: there is no such file; allowed is one that exists")
    given = {"at": ""} | options.given(chosen, Job) | {"command": (sys.executable, *script)}
    if isinstance(nodes := given.get("nodes"), str):
        raise ValueError(f"nodes={nodes!r}: allowed are LEAST:MOST, two numbers, or one")
    if chosen.job is not None:
        given["name"] = chosen.job
    if "logs" in given:
        given["logs"] = options.parse_path("logs", given["logs"])
    return Job(**given)


def _nodes(given: str) -> tuple[int, int]:
    """Parse the least and the largest number of nodes: 2:4, or 2 if they are equal."""
    least, _, most = given.partition(":")
    return int(least), int(most or least)
