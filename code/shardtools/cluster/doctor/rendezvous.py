"""A rendezvous of ranks that publish their steps, so that silent ranks can be named.

A faulty machine often shows as silence: a rank never comes, a file system call does not return, a
message is lost. So every rank works in a thread, and its main thread watches. Ranks publish JSON
through the launcher's store: `step/<rank>` is the rank's current step, with True if the rank waits
for others; `facts/<rank>` are its facts so far.
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
_POLL_SECONDS = 0.02
_LEAVE_SECONDS = 2.0  # rank 0, which may serve the store, waits so long for the others to leave
_FAILED_SECONDS = 1.0  # timeout after a rank has failed: the others cannot go on without it


def open_store(info: LaunchInfo, timeout: float) -> dist.Store:
    """Open the launcher's store, or one that rank 0 serves. Raises ValueError if none answers.

    The server listens only on rank 0's address, if rank 0's host has that address.
    """
    address = info.master_addr, info.master_port
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False}
    if info.rank == 0 and not info.has_agent_store:
        options["is_master"] = True
        with suppress(OSError):
            options["master_listen_fd"] = socket.create_server(address).detach()
    try:
        return dist.PrefixStore("doctor", dist.TCPStore(*address, **options))
    except (dist.DistError, RuntimeError) as error:
        raise ValueError(
            f"rank {info.rank} on {socket.gethostname()} found no store within {timeout:g} s at "
            f"{address[0]}:{address[1]} (MASTER_ADDR, MASTER_PORT): rank 0 did not come, or cannot "
            f"be reached from here{explain_loopback(info)} ({str(error).splitlines()[0]})"
        ) from None


def explain_loopback(info: LaunchInfo) -> str:
    """Explain that the rendezvous address is the loopback address ("" if it is not)."""
    with suppress(OSError):
        address = str(socket.getaddrinfo(info.master_addr, info.master_port)[0][4][0])
        if address.startswith("127.") or address == "::1":
            words = f". MASTER_ADDR={info.master_addr} is the loopback address, which reaches "
            return words + "only the host itself: set the name of the first node"
    return ""


class Rendezvous:
    """A meeting of all ranks at a store. timeout: seconds without progress until it ends."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float):
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.step, self._barriers = "", 0

    def set_step(self, words: str, waiting: bool = False) -> None:
        """Publish this rank's current step. waiting: the rank only waits for others."""
        self.step = words
        self.publish("step", [words, waiting])

    def publish(self, part: str, found: Any) -> None:
        """Publish this rank's facts of a part."""
        self.store.set(f"{part}/{self.rank}", json.dumps(found))

    def read(self, part: str, rank: int) -> Any:
        """Return the facts that `rank` published for a part, or None."""
        key = f"{part}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def barrier(self) -> None:
        """Wait until all ranks have come here, without a timeout: the main thread has one."""
        self.set_step(self.step, waiting=True)
        self._barriers += 1
        self.store.add(f"barrier {self._barriers}", 1)
        while self.store.add(f"barrier {self._barriers}", 0) < self.size:
            time.sleep(_POLL_SECONDS)
        self.set_step(self.step)

    def wait_for_all(self) -> dict[int, str]:
        """Wait on rank 0 until all ranks have finished; return the steps of the silent ranks."""
        last_steps, last_change, timeout = None, time.monotonic(), self.timeout
        while time.monotonic() - last_change < timeout:
            steps = {rank: self.read("step", rank) for rank in range(self.size)}
            ends = [step and step[0] in (DONE, FAILED) for step in steps.values()]
            if all(ends):
                return {}
            if [FAILED, True] in steps.values():
                timeout = min(timeout, _FAILED_SECONDS)
            if steps != last_steps:
                last_steps, last_change = steps, time.monotonic()
            time.sleep(_POLL_SECONDS)
        if timeout < self.timeout:  # the failed rank has published the reason
            return {}
        return _find_silent_ranks(steps)

    def leave_store(self) -> None:
        """Wait until rank 0 is done; rank 0, which may serve the store, leaves last."""
        if self.rank == 0:
            self.store.set("over", "")
        while not self.store.check(["over"]):
            time.sleep(_POLL_SECONDS)
        self.store.add("left", 1)
        limit = time.monotonic() + _LEAVE_SECONDS * (self.rank == 0)
        while time.monotonic() < limit and self.store.add("left", 0) < self.size:
            time.sleep(_POLL_SECONDS)


def _find_silent_ranks(steps: dict[int, Any]) -> dict[int, str]:
    """Return the ranks that keep the others waiting, with each one's step."""
    if absent := {rank: "it did not come" for rank, step in steps.items() if step is None}:
        return absent
    return {rank: words for rank, (words, waiting) in steps.items() if not waiting} or {
        rank: words for rank, (words, _) in steps.items()
    }
