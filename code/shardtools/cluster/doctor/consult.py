"""What every rank does at the doctor's: one part after another, under the eyes of rank 0.

The parts run in a thread, and each tells what it found at once. So when one of them never returns,
everything before it is known, and the main thread is free to say so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks

from . import checks, examine, folder, pairs
from .meet import Meeting
from .verdicts import BAD, Findings

JOINT = ("folder", "speed", "group", "clock", "pairs")  # parts in which ranks need one another


@dataclass(frozen=True)
class Settings:
    """What the command is told."""

    folder: str = "."
    needs: float = 1e9  # bytes that shall fit in there
    timeout: float = 60.0  # seconds of silence
    machine: str = ""
    device: str = "auto"


def consult(meeting: Meeting, settings: Settings, group: Callable[[str], Any]) -> Findings | None:
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
        if settings.device != "cpu" and (device := ranks.device()).type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        return examine.gpu(device)

    part("cores", examine.cores)
    torch.set_num_threads(1)  # of this thread's: a fork has lost its parent's others
    part("gpu", devices)
    part("versions", lambda: examine.versions(device))
    part("environment", examine.environment)
    part("memory", examine.memory)
    part("shm", examine.shared_memory)
    part("limits", examine.limits)
    part("network", examine.network)
    part("folder", lambda: folder.examine(settings.folder, meeting))
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
