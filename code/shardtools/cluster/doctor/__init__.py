"""`python -m shardlab doctor`: is this machine, or this job's set of hosts, fit to train on?

    python -m shardlab doctor --ranks 4                       # on this machine, ranks of its own
    torchrun --nproc-per-node 4 -m shardlab doctor --folder /scratch/me/run
    srun python -m shardlab doctor --folder /scratch/me/run --needs 200e9 --machine h100

All ranks look at their hosts, and at each other: versions, devices, cores, speed, clocks, memory,
limits, network with every link, and the folder of the checkpoints.
Rank 0 prints the verdict, then the evidence in one table; under each bad row stands what to do.

A rank that does not answer is named once nothing has moved for --timeout seconds. --machine names
the GPUs of the planner's table, with whose figures links and speed are compared (by default those
of the GPU that is found). Exit status: 0 all good, 1 something is bad, 2 it could not begin.
torchrun makes 1 of every status but 0, and prints its own report of a failed rank below the table.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.common.arguments import MOST, check_number
from shardlab.common.launcher import place
from shardlab.common.machines import MACHINES, check_named, named
from shardtools import options

from . import checks
from .consult import Settings, consult
from .meet import Rendezvous, loopback, open_store
from .verdicts import BAD, GOOD, Findings, Verdict

WIDTH = 100
LONGEST = 10**6  # seconds: the run's own limit, of four times as many, is a year at most


# --- under a launcher, or with ranks of its own


def _launched(settings: Settings, show: Callable[[Findings], int]) -> int:
    """Examine this process as one rank of a job that a launcher started, and leave."""
    at = place(os.environ)
    assert at is not None
    os.environ["LOCAL_RANK"] = str(at.local_rank)
    store = open_store(at, settings.timeout)
    meeting = Rendezvous(store, at.rank, at.size, settings.timeout)

    def group(backend: str) -> Any:
        own = dist.PrefixStore("group", store.clone())  # it blocks in there; the watch must not
        limit = timedelta(seconds=settings.timeout + 10)  # the watch is to ring first
        dist.init_process_group(backend, rank=at.rank, world_size=at.size, store=own, timeout=limit)
        return dist.group.WORLD

    findings = consult(meeting, settings, group)
    status = show(findings) if findings else 0
    silent = findings is not None and bool(findings.silent)
    if silent and (words := loopback(at)):
        print(f"doctor{words}", file=sys.stderr)
    meeting.leave(0.5 if silent else 3.0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # whatever still hangs in a thread of this process


def _alone(number: int, settings: Settings, show: Callable[[Findings], int]) -> int:
    """Examine this machine, with ranks of its own."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as own:
        path, limit, died = Path(own, "findings"), 4 * settings.timeout + 60, ""
        try:
            where = {"timeout": limit, "device": settings.device, "show": False}
            ranks.run(_rank, number, settings, path, **where)
        except ranks.RankError as error:
            died = str(error)
        if path.exists():
            return show(pickle.loads(path.read_bytes()))
        print(f"doctor: {died}", file=sys.stderr)
        return 1


def _rank(settings: Settings, path: Path) -> None:
    world = dist.group.WORLD
    store = dist.PrefixStore("doctor", world.get_group_store())
    meeting = Rendezvous(store, dist.get_rank(), dist.get_world_size(), settings.timeout)
    findings = consult(meeting, settings, lambda backend: world)
    if findings:
        path.write_bytes(pickle.dumps(findings))
        if findings.silent:
            raise RuntimeError("a rank does not answer")  # this ends it


# --- the command


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `doctor` to the command line."""
    parser = options.command(commands, "doctor", __doc__)
    add = partial(options.add, parser)
    add("ranks", "ranks to start here (one for each GPU; 2 without); not under a launcher", "N")
    add("folder", "where checkpoints will go (.)", "DIR")
    add("needs", "bytes that shall fit in there (1e9)", "BYTES")
    add("machine", f"what the planner assumes: {', '.join(MACHINES)} (by the GPU's name)", "NAME")
    add("device", "auto or cpu (auto)", "KIND")
    add("timeout", "seconds of silence after which a rank is given up (60)", "S")
    parser.add_argument("--pairs", action="store_true", help="list every link below the table")
    parser.add_argument("--json", action="store_true", help="print verdicts and facts as JSON")
    parser.set_defaults(command=_main)


def main(arguments: list[str]) -> int:
    """The command with these arguments; returns its exit status. ValueError for bad ones."""
    parser = options.Parser(prog="python -m shardlab")
    add_command(parser.add_subparsers())
    chosen = parser.parse_args(["doctor", *arguments])
    return chosen.command(chosen)


def _main(chosen: argparse.Namespace) -> int:
    number = None if chosen.ranks is None else options.whole("ranks", chosen.ranks)
    settings = Settings(
        "." if chosen.folder is None else str(options.place("folder", chosen.folder)),
        _number("needs", chosen.needs, 1e9),
        _number("timeout", chosen.timeout, 60.0),
        chosen.machine or "",
        "auto" if chosen.device is None else chosen.device,
    )
    if chosen.machine is not None:
        check_named(machine=settings.machine)
    if settings.device not in ("auto", "cpu"):
        raise ValueError(f"device={settings.device!r}: allowed are 'auto' and 'cpu'")
    launched = place(os.environ) is not None
    if launched and number is not None:
        raise ValueError(f"ranks={number}: the launcher has started the ranks; leave --ranks out")
    if not launched and not os.path.isdir(settings.folder):
        raise ValueError(f"folder={settings.folder!r}: allowed are folders that exist")
    show = partial(_show, settings, chosen.json, chosen.pairs)
    if launched:
        return _launched(settings, show)
    return _alone(number or torch.cuda.device_count() or 2, settings, show)


def _number(name: str, given: str | None, otherwise: float) -> float:
    if given is None:
        return otherwise
    value = options.number(name, given, "numbers above 0")
    check_number(most=LONGEST if name == "timeout" else MOST, **{name: value})
    return value


def _show(settings: Settings, as_json: bool, every: bool, findings: Findings) -> int:
    """Print what was found; return the exit status."""
    gpus = {gpu["name"] for gpu in findings.of("gpu").values()}
    known = [named(name) for name in ([settings.machine] if settings.machine else gpus)]
    findings.machine = known[0] if len(known) == 1 else None
    rows = checks.verdicts(findings)
    bad = any(row.state == BAD for row in rows)
    if as_json:
        print(json.dumps({"good": not bad, "rows": list(map(asdict, rows)), **asdict(findings)}))
    else:
        print(table(rows))
        if every:
            print(_links(findings))
    return int(bad)


def table(rows: list[Verdict]) -> str:
    """Return the report: the verdict, then each row's evidence, with the next step below it."""
    bad = [row.check for row in rows if row.state == BAD]
    verdict = f"{len(bad)} of {len(rows)} checks are bad: {', '.join(bad)}" if bad else "all good"
    lines = [verdict, ""]
    wrap = partial(textwrap.wrap, width=WIDTH, break_long_words=False, break_on_hyphens=False)
    for row in rows:
        state = row.state.upper() if row.state == BAD else row.state
        head, blank = f"{state:<5} {row.check:<9}", " " * 15
        lines += wrap(row.found, initial_indent=head, subsequent_indent=blank)
        if row.advice and row.state != GOOD:
            lines += wrap(row.advice, initial_indent=blank + "→ ", subsequent_indent=blank + "  ")
    return "\n".join(lines)


def _links(findings: Findings) -> str:
    """Return a table of every link."""
    links = [link for facts in findings.facts for link in facts.get("pairs") or []]
    lines = ["", "ranks      one way (µs)   bandwidth (GB/s)"]
    for link in sorted(links, key=lambda link: link["pair"]):
        pair = "{} and {}".format(*link["pair"])
        lines.append(f"{pair:<10} {link['latency'] * 1e6:12.0f} {link['bandwidth'] / 1e9:18.2f}")
    return "\n".join(lines)
