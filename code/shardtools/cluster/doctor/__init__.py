"""`python -m shardlab doctor`: check that this machine, or a job's hosts, are fit for training.

    python -m shardlab doctor --ranks 4                       # starts ranks on this machine
    torchrun --nproc-per-node 4 -m shardlab doctor --folder /scratch/me/run
    srun python -m shardlab doctor --folder /scratch/me/run --needs 200e9 --machine h100

All ranks check their hosts, and each other: versions, devices, cores, speed, clocks, memory,
limits, network with every link, and the folder of the checkpoints.
Rank 0 prints the verdict, then the evidence in one table; each bad row is followed by what to do.

Ranks that do not answer are named after --timeout seconds without progress. --machine names a GPU
of the planner's table, with whose figures links and speed are compared (by default the GPU that is
found). Exit status: 0 all good, 1 something is bad, 2 the doctor could not begin. torchrun turns
every status except 0 into 1, and prints its own report of a failed rank below the table.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import socket
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

from shardlab import ranks
from shardlab.common.arguments import check_integer, check_number, check_one_of
from shardlab.common.launcher import LaunchInfo, read_launch_info
from shardlab.common.machines import MACHINES, check_machine, find_machine
from shardtools import options

from . import checks, examine, folder, pairs
from .checks import BAD, Findings
from .meet import DONE, FAILED, Rendezvous, loopback, open_store

WIDTH = 100
LONGEST = 10**6  # seconds: the run's own limit is four times as long
Group = Callable[[str], dist.ProcessGroup]  # makes the group for a backend, on all ranks at once


@dataclass(frozen=True)
class Settings:
    """The command's options. Raises ValueError for a bad value."""

    folder: str = "."
    needs: float = 1e9  # bytes that must fit into the folder
    timeout: float = 60.0  # seconds of silence
    machine: str = ""
    device: str = "auto"
    pairs: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        options.parse_path("folder", self.folder)
        check_number(needs=self.needs)
        check_number(maximum=LONGEST, timeout=self.timeout)
        check_one_of(("auto", "cpu"), device=self.device)
        if self.machine:
            check_machine(machine=self.machine)


# --- one rank: it works in a thread, so that its facts are known if it hangs


def _consult(meeting: Rendezvous, settings: Settings, group: Group) -> Findings | None:
    """Run all examinations, on every rank; return the findings on rank 0, None on others.

    Raises ValueError on a rank that has lost rank 0.
    """
    threading.Thread(target=_work, args=(meeting, settings, group), daemon=True).start()
    silent = meeting.wait_for_all() if meeting.rank == 0 else {}
    try:
        meeting.end()
    except (dist.DistError, RuntimeError):  # the store ended with rank 0
        words = f"rank {meeting.rank} on {socket.gethostname()}: rank 0 is heard of no more"
        raise ValueError(words) from None
    if meeting.rank:
        return None
    facts = [meeting.read("facts", rank) or {} for rank in range(meeting.size)]
    return Findings(facts, silent, None, settings.needs)


def _work(meeting: Rendezvous, settings: Settings, group: Group) -> None:
    """Run all examinations; report any error to rank 0."""
    found: dict[str, Any] = {"host": socket.gethostname()}
    try:
        _examine(meeting, settings, group, found)
        meeting.set_step(DONE, waiting=True)
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        found["error"] = f"{meeting.step}: {type(error).__name__}: {text}"
        meeting.publish("facts", found)
        meeting.set_step(FAILED, waiting=True)


def _examine(meeting: Rendezvous, settings: Settings, group: Group, found: dict[str, Any]) -> None:
    """Run one examination after another, and publish the facts of each at once."""

    def part(name: str, look: Callable[..., Any], *given: Any) -> None:
        meeting.set_step(name)
        found[name] = look(*given)
        meeting.publish("facts", found)

    part("cores", examine.cores)
    torch.set_num_threads(1)  # for this thread: a fork has lost its parent's other threads
    device = torch.device("cpu") if settings.device == "cpu" else ranks.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the device is a setting of each thread
    part("gpu", examine.gpu, device)
    part("versions", examine.versions, device)
    part("environment", examine.environment)
    part("memory", examine.memory)
    part("limits", examine.limits)
    part("network", examine.network)
    part("folder", folder.examine, settings.folder, meeting)
    part("speed", examine.speed, device)
    meeting.barrier()
    job = Findings([meeting.read("facts", rank) for rank in range(meeting.size)])
    if meeting.size > 1 and not checks.interfaces(job):
        gpus = {gpu["kind"] for gpu in job.of("gpu").values()} == {"cuda"}
        own = gpus and not checks.devices(job)[0]  # nccl refuses two ranks on one GPU
        meeting.set_step("group")
        world = group("cpu:gloo,cuda:nccl" if own else "gloo")
        part("clock", pairs.clocks, meeting, world)
        part("pairs", pairs.measure, meeting, world, device, list(job.of("host").values()))


# --- under a launcher, or with ranks started here


def _launched(at: LaunchInfo, settings: Settings) -> int:
    """Examine this process as one rank of a launched job, and exit."""
    os.environ["LOCAL_RANK"] = str(at.local_rank)
    store = open_store(at, settings.timeout)
    meeting = Rendezvous(store, at.rank, at.world_size, settings.timeout)

    def group(backend: str) -> dist.ProcessGroup:
        own = dist.PrefixStore("group", store.clone())  # blocks; the main thread's store must not
        limit = timedelta(seconds=settings.timeout + 10)  # the doctor's own limit comes first
        dist.init_process_group(
            backend, rank=at.rank, world_size=at.world_size, store=own, timeout=limit
        )
        return dist.group.WORLD

    findings = _consult(meeting, settings, group)
    status = _show(settings, findings) if findings else 0
    if findings and findings.silent and (words := loopback(at)):
        print(f"doctor{words}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # exit even if a thread of this process hangs


def _alone(number: int, settings: Settings) -> int:
    """Examine this machine, with ranks started here."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as own:
        path, died = Path(own, "findings"), "no rank 0"
        how = {"timeout": 4 * settings.timeout + 60, "device": settings.device, "show": False}
        try:
            ranks.run(_rank, number, settings, path, **how)
        except ranks.RankError as error:
            died = str(error)
        if path.exists():
            return _show(settings, pickle.loads(path.read_bytes()))
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
            raise RuntimeError("a rank does not answer")  # so that `ranks.run` ends that rank


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


def _main(chosen: argparse.Namespace) -> int:
    settings = Settings(**options.given(chosen, Settings))
    number = torch.cuda.device_count() or 2 if chosen.ranks is None else chosen.ranks
    check_integer(ranks=number)
    if at := read_launch_info(os.environ):
        if chosen.ranks is not None:
            words = "the launcher has started the ranks; leave --ranks out"
            raise ValueError(f"ranks={number}: {words}")
        return _launched(at, settings)
    if not os.path.isdir(settings.folder):
        raise ValueError(f"folder={settings.folder!r}: allowed are folders that exist")
    return _alone(number, settings)


def _show(settings: Settings, findings: Findings) -> int:
    """Print the verdict, and each row's evidence above its next step; return the exit status."""
    gpus = {gpu["name"] for gpu in findings.of("gpu").values()}
    known = [find_machine(name) for name in ([settings.machine] if settings.machine else gpus)]
    findings.machine = known[0] if len(known) == 1 else None
    rows = checks.verdicts(findings)
    bad = [row.check for row in rows if row.state == BAD]
    if settings.json:
        print(json.dumps({"good": not bad, "rows": list(map(asdict, rows)), **asdict(findings)}))
        return int(bool(bad))
    print(f"{len(bad)} of {len(rows)} checks are bad: {', '.join(bad)}" if bad else "all good")
    print()
    wrap = partial(textwrap.wrap, width=WIDTH, break_long_words=False, break_on_hyphens=False)
    blank = " " * 15
    for row in rows:
        state = row.state.upper() if row.state == BAD else row.state
        head = f"{state:<5} {row.check:<9}"
        lines = wrap(row.found, initial_indent=head, subsequent_indent=blank)
        lines += wrap(row.advice, initial_indent=f"{blank}→ ", subsequent_indent=f"{blank}  ")
        print(*lines, sep="\n")
    if settings.pairs:
        links = [link for facts in findings.facts for link in facts.get("pairs") or []]
        print("\nranks      one way (µs)   bandwidth (GB/s)")
        for link in sorted(links, key=lambda link: link["pair"]):
            pair = "{} and {}".format(*link["pair"])
            print(f"{pair:<10} {link['latency'] * 1e6:12.0f} {link['bandwidth'] / 1e9:18.2f}")
    return int(bool(bad))
