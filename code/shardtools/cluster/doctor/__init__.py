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
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.common.arguments import check_number, check_one_of, check_whole
from shardlab.common.launcher import place
from shardlab.common.machines import MACHINES, check_named, named
from shardtools import options

from . import checks, examine, folder, pairs
from .meet import Rendezvous, loopback, open_store
from .verdicts import BAD, GOOD, Findings, Verdict

WIDTH = 100
LONGEST = 10**6  # seconds: the run's own limit, of four times as many, is a year at most
JOINT = ("folder", "speed", "group", "clock", "pairs")  # parts in which ranks need one another


@dataclass(frozen=True)
class Settings:
    """The command's options. Raises ValueError for a value that cannot be."""

    folder: str = "."
    needs: float = 1e9  # bytes that must fit into the folder
    timeout: float = 60.0  # seconds of silence
    machine: str = ""
    device: str = "auto"

    def __post_init__(self) -> None:
        options.place("folder", self.folder)
        check_number(needs=self.needs)
        check_number(most=LONGEST, timeout=self.timeout)
        check_one_of(("auto", "cpu"), device=self.device)
        if self.machine:
            check_named(machine=self.machine)


# --- one rank: the parts run in a thread, so that of one that hangs all before it is known


def _consult(
    meeting: Rendezvous, settings: Settings, group: Callable[[str], Any]
) -> Findings | None:
    """Examine everything, on every rank; rank 0 gets the findings.

    group: makes the process group for a backend, on all ranks; called when all of them are there.
    Raises ValueError on a rank that has lost rank 0.
    """
    worker = threading.Thread(target=_work, args=(meeting, settings, group), daemon=True)
    worker.start()
    if meeting.rank:
        heard = False
        with suppress(dist.DistError, RuntimeError):  # the store went with rank 0
            heard = meeting.await_end(worker.is_alive)
        if not heard:
            raise ValueError(f"rank {meeting.rank} on {examine.host()}: rank 0 is heard of no more")
        return None
    silent = meeting.wait_for_all("done")
    facts = [meeting.read("facts", rank) or {} for rank in range(meeting.size)]
    meeting.store.set("over", b"")
    return Findings(facts, silent, None, settings.needs)


def _work(meeting: Rendezvous, settings: Settings, group: Callable[[str], Any]) -> None:
    """Run one part after another, and publish what each found as soon as it is known."""
    found: dict[str, Any] = {"host": examine.host()}

    def part(name: str, look: Callable[[], Any]) -> Any:
        meeting.set_step(name)
        try:
            found[name] = look()
        except Exception as error:  # whatever it is, rank 0 has to hear of it
            text = (str(error).strip() or "no message").splitlines()[0]
            found.setdefault("errors", {})[name] = f"{type(error).__name__}: {text}"
            if name in JOINT:
                meeting.publish("facts", found)
                meeting.store.set("failed", b"")
        meeting.publish("facts", found)
        return found.get(name)

    part("cores", examine.cores)
    torch.set_num_threads(1)  # of this thread's: a fork has lost its parent's others
    device = torch.device("cpu") if settings.device == "cpu" else ranks.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    part("gpu", lambda: examine.gpu(device))
    part("versions", lambda: examine.versions(device))
    part("environment", examine.environment)
    part("memory", examine.memory)
    part("shm", examine.shared_memory)
    part("limits", examine.limits)
    part("network", examine.network)
    part("folder", lambda: folder.examine(settings.folder, meeting))
    meeting.barrier("own parts")
    part("speed", lambda: examine.speed(device))
    meeting.barrier("speeds")
    job = Findings([meeting.read("facts", rank) for rank in range(meeting.size)])
    if meeting.size > 1 and not checks.interfaces(job):
        gpus = {gpu["kind"] for gpu in job.of("gpu").values()} == {"cuda"}
        own = gpus and checks.devices(job).state != BAD  # nccl refuses two ranks on one GPU
        hosts, world = [facts["host"] for facts in job.facts], []
        part("group", lambda: world.append(group("cpu:gloo,cuda:nccl" if own else "gloo")))
        if world:
            part("clock", lambda: pairs.clocks(meeting, *world))
            part("pairs", lambda: pairs.measure(meeting, *world, device, hosts))
    meeting.publish("done", True)


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

    findings = _consult(meeting, settings, group)
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
    findings = _consult(meeting, settings, lambda backend: world)
    if findings:
        path.write_bytes(pickle.dumps(findings))
        if findings.silent:
            raise RuntimeError("a rank does not answer")  # this ends it


# --- the command


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `doctor` to the command line."""
    parser = options.command(commands, "doctor", __doc__)
    add = partial(options.add, parser)
    words = "ranks to start here (one for each GPU; 2 without); not under a launcher"
    add("ranks", words, "N", int)
    add("folder", "where checkpoints will go (.)", "DIR")
    add("needs", "bytes that shall fit in there (1e9)", "BYTES", float)
    add("machine", f"what the planner assumes: {', '.join(MACHINES)} (by the GPU's name)", "NAME")
    add("device", "auto or cpu (auto)", "KIND")
    add("timeout", "seconds of silence after which a rank is given up (60)", "S", float)
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
    settings = Settings(**options.given(chosen, Settings))
    number = torch.cuda.device_count() or 2 if chosen.ranks is None else chosen.ranks
    check_whole(ranks=number)
    launched = place(os.environ) is not None
    if launched and chosen.ranks is not None:
        raise ValueError(f"ranks={number}: the launcher has started the ranks; leave --ranks out")
    if not launched and not os.path.isdir(settings.folder):
        raise ValueError(f"folder={settings.folder!r}: allowed are folders that exist")
    show = partial(_show, settings, chosen.json, chosen.pairs)
    if launched:
        return _launched(settings, show)
    return _alone(number, settings, show)


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
