"""`python -m shardlab doctor`: is this machine, or this job's set of hosts, fit to train on?

    python -m shardlab doctor --ranks 4                       # on this machine, ranks of its own
    torchrun --nproc-per-node 4 -m shardlab doctor --folder /scratch/me/run
    srun python -m shardlab doctor --folder /scratch/me/run --needs 200e9 --machine h100

All ranks look at their hosts, and at each other: versions, devices, cores, speed, clocks, memory,
/dev/shm, limits, network, every link, and the folder in which checkpoints will lie. Rank 0 prints
one table; under each bad row stands what to do.

A rank that does not answer is named once nothing has moved for --timeout seconds. --machine names
the GPUs of the planner's table, with whose figures links and speed are compared (by default those
of the GPU that is found). Exit status: 0 all good, 1 something is bad, 2 it could not begin.
torchrun makes 1 of every status but 0, and prints its own report of a failed rank below the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab import options, ranks
from shardlab.arguments import check_number
from shardlab.machines import MACHINES, Machine

from . import checks, examine, pairs
from .meet import Meeting, place, store_of
from .verdicts import BAD, GOOD, Findings, Verdict, listed

WIDTH = 100
JOINT = ("folder", "speed", "group", "clock", "pairs")  # parts in which ranks need one another


@dataclass(frozen=True)
class Settings:
    """What the command is told."""

    folder: str = "."
    needs: float = 1e9  # bytes that shall fit in there
    timeout: float = 60.0  # seconds of silence
    machine: str = ""
    device: str = "auto"


# --- what every rank does


def consult(meeting: Meeting, settings: Settings, group: Callable[[str], Any]) -> Findings | None:
    """Examine everything, on every rank; rank 0 gets the findings.

    group: makes the process group for a backend, on all ranks; called when all of them are there.
    """
    worker = threading.Thread(target=_work, args=(meeting, settings, group), daemon=True)
    worker.start()
    if meeting.rank:
        meeting.await_end(worker.is_alive)
        return None
    silent = meeting.missing("done")
    facts = [meeting.heard("facts", rank) or {} for rank in range(meeting.size)]
    plan = meeting.heard("plan", 0) or {}
    meeting.end()
    return Findings(facts, silent, None, settings.needs, plan.get("why", ""))


def _work(meeting: Meeting, settings: Settings, group: Callable[[str], Any]) -> None:
    """One part after another, each told as soon as it is known."""
    found: dict[str, Any] = {"host": examine.host(), "pid": os.getpid()}

    def part(name: str, look: Callable[[], Any]) -> None:
        meeting.at(name)
        try:
            found[name] = look()
        except Exception as error:  # whatever it is, rank 0 has to hear of it
            text = (str(error).strip() or "no message").splitlines()[0]
            found.setdefault("errors", {})[name] = f"{type(error).__name__}: {text}"
            meeting.tell("facts", found)
            if name in JOINT:
                meeting.fail()
        meeting.tell("facts", found)

    device = torch.device("cpu")

    def devices() -> dict[str, Any]:
        nonlocal device
        device = _device(settings)
        return examine.gpu(device)

    part("cores", examine.cores)
    torch.set_num_threads(1)  # of this thread's: a fork has lost its parent's others
    part("gpu", devices)
    part("versions", lambda: examine.versions(device))
    part("memory", examine.memory)
    part("shm", examine.shared_memory)
    part("limits", examine.limits)
    part("network", examine.network)
    part("folder", lambda: examine.folder(settings.folder, meeting))
    meeting.together("own parts")
    hosts = [meeting.heard("facts", rank)["host"] for rank in range(meeting.size)]
    part("speed", lambda: _speed(meeting, device, hosts))
    if plan := _plan(meeting):
        carried: list[Any] = []
        part("group", lambda: carried.append(group(plan)))
        if carried:
            part("clock", lambda: pairs.clocks(meeting, carried[0]))
            part("pairs", lambda: pairs.measure(meeting, carried[0], device, hosts))
    meeting.tell("done", True)


def _speed(meeting: Meeting, device: torch.device, hosts: list[str]) -> Any:
    """This rank's speed. GPUs compute all at once, as in a job; without them the ranks of a host
    take turns, up to eight: they may share its cores."""
    mine, most = hosts[: meeting.rank].count(hosts[meeting.rank]), max(map(hosts.count, hosts))
    gpus = [(meeting.heard("facts", r).get("gpu") or {}).get("kind") for r in range(meeting.size)]
    if "cuda" in gpus or most > 8:
        return examine.speed(device)
    found = None
    for turn in range(most):
        if turn == mine:
            found = examine.speed(device)
        meeting.together(f"speed {turn}")
    return found


def _device(settings: Settings) -> torch.device:
    """The rank's own: the GPU with its local number, as a training script would take it."""
    gpus = torch.cuda.device_count()
    if settings.device == "cpu" or not gpus:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
    torch.cuda.set_device(device)  # of this thread
    return device


def _plan(meeting: Meeting) -> str:
    """The backend for the links, as rank 0 decides it from what all found; "" for no links."""
    meeting.together("all parts")
    if meeting.rank == 0:
        job = Findings([meeting.heard("facts", rank) for rank in range(meeting.size)])
        why = "one rank has no links" if meeting.size == 1 else ""
        if (net := checks.network(job)).state == BAD:
            why = net.found
        gpus = {gpu["kind"] for gpu in job.of("gpu").values()} == {"cuda"}
        own = gpus and checks.devices(job).state != BAD  # nccl refuses two ranks on one GPU
        meeting.tell("plan", {"backend": "cpu:gloo,cuda:nccl" if own else "gloo", "why": why})
    meeting.together("the plan")
    plan = meeting.heard("plan", 0)
    return "" if plan["why"] else plan["backend"]


# --- three ways to start


def _launched(settings: Settings, show: Callable[[Findings], int]) -> int:
    """As one rank of a job that a launcher started."""
    at = place(os.environ)
    assert at is not None
    os.environ["LOCAL_RANK"] = str(at.local_rank)
    store = store_of(at, settings.timeout)
    meeting = Meeting(store, at.rank, at.size, settings.timeout)
    meeting.tell("who", examine.host())

    def group(backend: str) -> Any:
        own = dist.PrefixStore("group", store.clone())  # it blocks in there; the watch must not
        limit = timedelta(seconds=settings.timeout + 10)  # the watch is to ring first
        dist.init_process_group(backend, rank=at.rank, world_size=at.size, store=own, timeout=limit)
        return dist.group.WORLD

    status = 0
    if at.rank == 0 and (absent := meeting.missing("who")):
        meeting.end()
        came = [r for r in range(at.size) if r not in absent]
        hosts = ", ".join(dict.fromkeys(meeting.heard("who", r) for r in came))
        _say(
            f"{listed(absent)} of {at.size} did not come, and nothing moved for "
            f"{settings.timeout:g} s; {listed(came)} did, on {hosts}"
        )
        status = 2
    else:
        findings = consult(meeting, settings, group)
        status = show(findings) if findings else 0
    meeting.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # whatever still hangs in a thread of this process


def _alone(number: int, settings: Settings, show: Callable[[Findings], int]) -> int:
    """On this machine, with ranks of its own."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as own:
        path, limit = Path(own, "findings"), 4 * settings.timeout + 60
        died = ""
        try:
            where = {"timeout": limit, "device": settings.device, "show": False}
            ranks.run(_rank, number, settings, path, **where)
        except ranks.RankError as error:
            died = str(error)
        if path.exists():
            return show(Findings(**json.loads(path.read_text("utf-8"))))
        _say(died)
        return 1


def _rank(settings: Settings, path: Path) -> None:
    world = dist.group.WORLD
    store = dist.PrefixStore("doctor", world.get_group_store())
    meeting = Meeting(store, dist.get_rank(), dist.get_world_size(), settings.timeout)
    findings = consult(meeting, settings, lambda backend: world)
    if findings:
        path.write_text(json.dumps(asdict(findings)), "utf-8")
        if findings.silent:
            raise RuntimeError("a rank does not answer")  # this ends it


def _say(text: str) -> None:
    print(f"doctor: {text}", file=sys.stderr)


# --- the command


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `doctor` to the command line."""
    words = "whether this machine, or this job's hosts, are fit to train on"
    parser = options.command(commands, "doctor", words, __doc__)
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


def _main(chosen: argparse.Namespace) -> int:
    number = None if chosen.ranks is None else options.whole("ranks", chosen.ranks)
    settings = Settings(
        "." if chosen.folder is None else chosen.folder,
        _number("needs", chosen.needs, 1e9),
        _number("timeout", chosen.timeout, 60.0),
        chosen.machine or "",
        "auto" if chosen.device is None else chosen.device,
    )
    if chosen.machine is not None and settings.machine not in MACHINES:
        raise ValueError(f"machine={chosen.machine!r}: allowed are {', '.join(MACHINES)}")
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
    try:
        value = float(given)
    except ValueError:
        raise ValueError(f"{name}={given!r}: allowed are numbers above 0") from None
    check_number(**{name: value})
    return value


def _machine(named: str, findings: Findings) -> Machine | None:
    """What the planner assumes of these GPUs: the one that is named, else the one of that name."""
    names = {gpu["name"] for gpu in findings.of("gpu").values()}
    fits = [m for m in MACHINES.values() if all(m.name.lower() in n.lower() for n in names)]
    return MACHINES[named] if named else (fits[0] if names and fits else None)


def _show(settings: Settings, as_json: bool, every: bool, findings: Findings) -> int:
    findings.machine = _machine(settings.machine, findings)
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
    """The rows as text; what to do stands below what was found."""
    lines = []
    for row in rows:
        state = row.state.upper() if row.state == BAD else row.state
        head, blank = f"{state:<5} {row.check:<12}", " " * 18
        wrap = partial(textwrap.wrap, width=WIDTH, break_long_words=False, break_on_hyphens=False)
        lines += wrap(row.found, initial_indent=head, subsequent_indent=blank)
        if row.advice and row.state != GOOD:
            lines += wrap(row.advice, initial_indent=blank + "→ ", subsequent_indent=blank + "  ")
    bad = sum(row.state == BAD for row in rows)
    return "\n".join([*lines, "", f"{bad} of {len(rows)} checks are bad" if bad else "all good"])


def _links(findings: Findings) -> str:
    links = [link for facts in findings.facts for link in facts.get("pairs") or []]
    lines = ["", "ranks      one way (µs)   bandwidth (GB/s)"]
    for link in sorted(links, key=lambda link: link["pair"]):
        pair = "{} and {}".format(*link["pair"])
        lines.append(f"{pair:<10} {link['latency'] * 1e6:12.0f} {link['bandwidth'] / 1e9:18.2f}")
    return "\n".join(lines)
