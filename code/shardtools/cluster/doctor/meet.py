"""A rendezvous of ranks, which publish their steps, and are named if they do not answer.

A faulty machine often shows as silence: a rank that never comes, a file system call that does not
return, a message that is lost. So every rank works in a thread, and its main thread watches. Ranks
publish through the launcher's store, as JSON: `step/<rank>` is the current step of a rank, and True
if it waits for others; `facts/<rank>` is what it has found so far.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardlab.common.launcher import LaunchInfo

DONE, FAILED = "done", "failed"  # a rank's last step
_TICK = 0.02  # seconds between two looks at the store
_LEAVE = 2.0  # seconds that rank 0, which may keep the store, waits for the others to leave
_FAILED = 1.0  # seconds of silence after a rank has failed: others cannot go on without it


def open_store(at: LaunchInfo, patience: float) -> dist.Store:
    """Open the store at `at`, as its server on rank 0 unless the launcher keeps the store.

    The server listens only on rank 0's address, if that is an address of rank 0's host. Raises
    ValueError if no store answers there.
    """
    how: dict[str, Any] = {"timeout": timedelta(seconds=patience), "wait_for_workers": False}
    if at.rank == 0 and not at.has_agent_store:
        how["is_master"] = True
        with suppress(OSError):
            how["master_listen_fd"] = socket.create_server(
                (at.master_addr, at.master_port)
            ).detach()
    try:
        return dist.PrefixStore("doctor", dist.TCPStore(at.master_addr, at.master_port, **how))
    except (dist.DistError, RuntimeError) as error:
        raise ValueError(
            f"rank {at.rank} on {socket.gethostname()} found no store at "
            f"{at.master_addr}:{at.master_port} (MASTER_ADDR, MASTER_PORT) within "
            f"{patience:g} s: rank 0 did not come, or cannot be "
            f"reached from here{loopback(at)} ({str(error).splitlines()[0]})"
        ) from None


def loopback(at: LaunchInfo) -> str:
    """Explain that the rendezvous address is the loopback address ("" if it is not)."""
    with suppress(OSError):
        address = str(socket.getaddrinfo(at.master_addr, at.master_port)[0][4][0])
        if address.startswith("127.") or address == "::1":
            words = f". MASTER_ADDR={at.master_addr} is the loopback address: each host meets only "
            return words + "itself there. Set the first node's name"
    return ""


class Rendezvous:
    """All ranks at one store. `patience`: seconds of silence after which rank 0 gives up."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience: float):
        self.store, self.rank, self.size, self.patience = store, rank, size, patience
        self.step, self._barriers = "", 0

    def set_step(self, words: str, waiting: bool = False) -> None:
        """Publish this rank's current step, or that it is done and the rank waits for others."""
        self.step = words
        self.publish("step", [words, waiting])

    def publish(self, part: str, found: Any) -> None:
        """Publish this rank's facts of a part."""
        self.store.set(f"{part}/{self.rank}", json.dumps(found))

    def read(self, part: str, rank: int) -> Any:
        """Return what `rank` published, or None."""
        key = f"{part}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def barrier(self) -> None:
        """Wait until all ranks have come here, without a limit: the main thread has one."""
        self.set_step(self.step, waiting=True)
        self._barriers += 1
        self.store.add(f"barrier {self._barriers}", 1)
        while self.store.add(f"barrier {self._barriers}", 0) < self.size:
            time.sleep(_TICK)
        self.set_step(self.step)

    def wait_for_all(self) -> dict[int, str]:
        """Wait on rank 0 until all have ended their work; return the silent ranks' steps."""
        before, moved, patience = None, time.monotonic(), self.patience
        while time.monotonic() - moved < patience:
            steps = {rank: self.read("step", rank) for rank in range(self.size)}
            ends = [step and step[0] in (DONE, FAILED) for step in steps.values()]
            if all(ends):
                return {}
            if [FAILED, True] in steps.values():
                patience = min(patience, _FAILED)
            if steps != before:
                before, moved = steps, time.monotonic()
            time.sleep(_TICK)
        if patience < self.patience:  # the failed rank gives the reason; the others wait in vain
            return {}
        return _find_culprits(steps)

    def end(self) -> None:
        """End on all ranks when rank 0 is done; rank 0 may keep the store, and leaves last."""
        if self.rank == 0:
            self.store.set("over", "")
        while not self.store.check(["over"]):
            time.sleep(_TICK)
        self.store.add("left", 1)
        limit = time.monotonic() + _LEAVE * (self.rank == 0)
        while time.monotonic() < limit and self.store.add("left", 0) < self.size:
            time.sleep(_TICK)


def _find_culprits(steps: dict[int, Any]) -> dict[int, str]:
    """Return the ranks that keep the others waiting, with each one's step."""
    if never := {rank: "it did not come" for rank, step in steps.items() if step is None}:
        return never
    return {rank: words for rank, (words, waiting) in steps.items() if not waiting} or {
        rank: words for rank, (words, _) in steps.items()
    }
