"""`python -m shardlab cluster run`: be the agent of this node.

    python -m shardlab cluster run --nodes 2 --ranks 4 --at node1:29400 train.py --steps 100
    python -m shardlab cluster run --at 127.0.0.1:29400 --ranks 2 --logs logs train.py --steps 100
    python -m shardlab cluster run --at 127.0.0.1:29400 -- -m package.module --steps 100

What stands behind the script goes to it as it is, also what looks like one of these options.
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
    add("ranks", "on this node (1)", "N")
    add("nodes", "how many, or how many at least and at most (1)", "LEAST:MOST")
    add("job", "its name: agents of another job are turned away (job)", "NAME")
    add("restarts", "of all ranks after one has failed (3)", "N")
    add("patience", "seconds until a silent agent is left out (5)", "S")
    add("last-call", "seconds for more nodes, when the least number is there (2)", "S")
    add("join", "seconds for the least number of nodes to come (600)", "S")
    add("grace", "seconds between SIGTERM and SIGKILL (10)", "S")
    add("logs", "folder for what each rank writes (to the agent's own output)", "DIR")
    parser.add_argument("script", help="what every rank runs, and its arguments", nargs="...")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    job = told(chosen)
    if job.logs:
        options.folder("logs", job.logs)
    from shardlab.elastic import core  # here: torch takes seconds, and bad input is refused at once

    return core.run(job, partial(print, flush=True))


def told(chosen: argparse.Namespace) -> Job:
    """The job that options, all of them text, describe. Raises ValueError for bad ones."""
    script = [*chosen.script]
    if script[:1] == ["--"]:
        script.pop(0)
    if not script:
        raise ValueError("script: missing; allowed are a file, or -- -m MODULE")
    if script[0] != "-m" and not os.path.isfile(script[0]):
        raise ValueError(f"script={script[0]!r}: there is no such file; allowed is one that exists")
    given = {"command": (sys.executable, *script), "at": chosen.at or ""}
    if chosen.nodes is not None:
        least, _, most = chosen.nodes.partition(":")
        allowed = "LEAST:MOST, two numbers above 0, or one"
        numbers = [options.number("nodes", n, allowed, int) for n in (least, most or least)]
        given["nodes"] = (numbers[0], numbers[1])
    if chosen.ranks is not None:
        given["ranks"] = options.whole("ranks", chosen.ranks)
    if chosen.restarts is not None:
        given["restarts"] = options.whole("restarts", chosen.restarts, 0)
    for name in ("patience", "last_call", "join", "grace"):
        if (value := getattr(chosen, name)) is not None:
            given[name] = options.number(name, value, "numbers of seconds")
    if chosen.job is not None:
        given["name"] = chosen.job
    if chosen.logs is not None:
        given["logs"] = options.place("logs", chosen.logs)
    return Job(**given)
