"""What every rank does at the doctor's: one part after another, watched by rank 0.

The parts run in a thread, and each publishes what it found at once. So when one of them never
returns, everything before it is known, and the main thread is free to say so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks

from . import checks, examine, folder, pairs
from .meet import Rendezvous
from .verdicts import BAD, Findings

JOINT = ("folder", "speed", "group", "clock", "pairs")  # parts in which ranks need one another


@dataclass(frozen=True)
class Settings:
    """What the command is told."""

    folder: str = "."
    needs: float = 1e9  # bytes that must fit into the folder
    timeout: float = 60.0  # seconds of silence
    machine: str = ""
    device: str = "auto"


def consult(
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
