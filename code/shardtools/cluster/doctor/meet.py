"""Ranks meet, publish where they stand, and are named when they do not answer.

What is wrong with a machine often shows as silence: a rank that never comes, a file system that
does not return, a message that is lost. So every rank works in a thread of its own, and the main
one watches. What ranks say goes through the launcher's store:

    step/<rank>     what it does now, and whether it waits for others
    <part>/<rank>   what it found there, as JSON
    failed          a rank failed where others need it: they would wait in vain
    over            rank 0 has heard enough

As long as anything moves, rank 0 waits; after `patience` seconds of silence it names whoever does
not wait itself.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardlab.common.launcher import Place

_TICK = 0.02  # seconds between two looks at the store


def open_store(at: Place, patience: float) -> dist.Store:
    """Open the store at `at`, as its server on rank 0 unless the launcher keeps it.

    It listens on rank 0's address alone, where that is one of its host's own. Raises ValueError
    when nobody answers there.
    """
    how: dict[str, Any] = {"timeout": timedelta(seconds=patience), "wait_for_workers": False}
    if at.rank == 0 and not at.served:
        how["is_master"] = True
        with suppress(OSError):
            server = socket.create_server((at.address, at.port))
            how["master_listen_fd"] = server.detach()
    try:
        return dist.PrefixStore("doctor", dist.TCPStore(at.address, at.port, **how))
    except (dist.DistError, RuntimeError) as error:
        raise ValueError(
            f"rank {at.rank} on {socket.gethostname()} found no store at {at.address}:{at.port} "
            f"(MASTER_ADDR, MASTER_PORT) within {patience:g} s: rank 0 did not come, or cannot be "
            f"reached from here{loopback(at)} ({str(error).splitlines()[0]})"
        ) from None


def loopback(at: Place) -> str:
    """Name the meeting point's address if it is each host's own ("" if it is not)."""
    with suppress(OSError):
        address = str(socket.getaddrinfo(at.address, at.port)[0][4][0])
        if address.startswith("127.") or address == "::1":
            words = f". MASTER_ADDR={at.address} is the loopback address: each host meets only "
            return words + "itself there. Set the first node's name"
    return ""


class Rendezvous:
    """All ranks at one store. `patience`: seconds of silence after which rank 0 gives up."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience: float):
        self.store, self.rank, self.size, self.patience = store, rank, size, patience
        self._step = ""

    def set_step(self, words: str, waiting: bool = False) -> None:
        """Publish what this rank does now, or that it has done that and waits for others."""
        self._step = words
        self.publish("step", [words, waiting])

    def publish(self, part: str, found: Any) -> None:
        """Publish what this rank found."""
        self.store.set(f"{part}/{self.rank}", json.dumps(found))

    def read(self, part: str, rank: int) -> Any:
        """Return what `rank` published; None if it has not."""
        key = f"{part}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def barrier(self, name: str) -> None:
        """Wait until all ranks have come to `name`. Without a limit: the main thread has that."""
        self.publish(name, True)
        self.set_step(self._step, waiting=True)
        while not self.store.check([f"{name}/{rank}" for rank in range(self.size)]):
            time.sleep(_TICK)
        self.set_step(self._step)

    def wait_for_all(self, part: str) -> dict[int, str]:
        """Wait on rank 0 until all have published `part`; return where the silent ones stand."""
        silent, moved = set(range(self.size)), time.monotonic()
        before: dict[int, Any] = {}
        while silent := {r for r in silent if not self.store.check([f"{part}/{r}"])}:
            steps = {rank: self.read("step", rank) for rank in silent}
            if steps != before:
                before, moved = steps, time.monotonic()
            elif time.monotonic() - moved > self.patience:
                return _find_culprits(steps)
            elif self.store.check(["failed"]) and time.monotonic() - moved > 1.0:
                break  # who failed says why
            time.sleep(_TICK)
        return {}

    def await_end(self, works: Callable[[], bool]) -> bool:
        """Wait until rank 0 is done; False if it is silent for long after this rank's work."""
        since = time.monotonic()
        while not self.store.check(["over"]):
            if works():
                since = time.monotonic()
            elif time.monotonic() - since > 3 * self.patience:
                return False
            time.sleep(_TICK)
        return True

    def leave(self, seconds: float) -> None:
        """Leave the store; rank 0, which may keep it, waits for the others so many seconds."""
        with suppress(dist.DistError, RuntimeError):
            self.store.add("left", 1)
            limit = time.monotonic() + seconds
            while self.rank == 0 and time.monotonic() < limit:
                if self.store.add("left", 0) == self.size:
                    break
                time.sleep(_TICK)


def _find_culprits(steps: dict[int, Any]) -> dict[int, str]:
    """Return the ranks that keep the others waiting, and what each of them does."""
    if never := {rank: "it did not come" for rank, step in steps.items() if step is None}:
        return never
    return {r: words for r, (words, waiting) in steps.items() if not waiting} or {
        rank: words for rank, (words, _) in steps.items()
    }
