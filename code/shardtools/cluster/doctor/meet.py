"""Ranks meet, say where they stand, and are named when they do not answer.

What is wrong with a machine often shows as silence: a rank that never comes, a file system that
does not return, a message that is lost. So nothing here waits without a limit. Every rank works in
a thread of its own; the main one watches. What ranks say goes through the launcher's store:

    who/<rank>      this rank has come, and from which host
    at/<rank>       what it does now: the step's number, its words, and whether it waits for others
    <part>/<rank>   what it found there, as JSON
    failed          a rank failed where others need it: they would wait in vain
    over            rank 0 has heard enough

As long as anything moves, rank 0 waits; after `patience` seconds of silence it names whoever works
on the earliest step, and does not wait itself.
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


def store_of(at: Place, patience: float) -> dist.Store:
    """The store at `at`, kept by rank 0 unless the launcher keeps it.

    It listens on rank 0's address alone, where that is one of its host's own. ValueError when
    nobody answers there.
    """
    host = at.rank == 0 and not at.served
    where = f"{at.address}:{at.port} (MASTER_ADDR, MASTER_PORT)"
    listening: dict[str, Any] = {}
    if host:
        with suppress(OSError):
            server = socket.create_server((at.address, at.port))
            listening = {"master_listen_fd": server.detach()}
    else:
        _knock(at, where, patience)
    try:
        store = dist.TCPStore(
            at.address,
            at.port,
            is_master=host,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            **listening,
        )
    except (dist.DistError, RuntimeError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"rank {at.rank} has no store at {where}: {line}") from None
    return dist.PrefixStore("doctor", store)


def loopback(at: Place) -> str:
    """Name the meeting point's address if it is each host's own ("" if it is not)."""
    with suppress(OSError):
        address = socket.getaddrinfo(at.address, at.port)[0][4][0]
        if str(address).startswith("127.") or address == "::1":
            return (
                f". MASTER_ADDR={at.address} is the loopback address: each host meets only itself "
                "there. Set the first node's name"
            )
    return ""


def _knock(at: Place, where: str, patience: float) -> None:
    """Wait until somebody listens there."""
    limit = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((at.address, at.port), timeout=1.0).close()
        except OSError as error:
            if time.monotonic() > limit:
                raise ValueError(
                    f"rank {at.rank} on {socket.gethostname()} found nobody at {where} within "
                    f"{patience:g} s ({error.strerror or error}): rank 0 did not come, or cannot "
                    f"be reached from here{loopback(at)}"
                ) from None
            time.sleep(0.1)


class Meeting:
    """All ranks at one store. `patience`: seconds of silence after which nobody waits any more."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience: float):
        self.store, self.rank, self.size, self.patience = store, rank, size, patience
        self._step, self._words = 0, ""

    def at(self, words: str) -> None:
        """From here on this rank does `words`."""
        self._step, self._words = self._step + 1, words
        self._stand(words, False)

    def _stand(self, words: str, waits: bool) -> None:
        self.store.set(f"at/{self.rank}", json.dumps([self._step, words, waits]))

    def waits(self, steps: int = 0) -> None:
        """From here on this rank only waits for others; it had no part in so many steps."""
        self._step += steps
        self._stand(self._words, True)

    def tell(self, part: str, found: Any) -> None:
        """What this rank found there."""
        self.store.set(f"{part}/{self.rank}", json.dumps(found))

    def heard(self, part: str, rank: int) -> Any:
        """What `rank` told of `part`; None if it has not."""
        key = f"{part}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def together(self, name: str) -> None:
        """Wait until all ranks have come to `name`. Without a limit: the main thread has that."""
        self.tell(name, True)
        self.waits()
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        while not self.store.check(keys):
            time.sleep(_TICK)
        self.at(self._words)  # all go on, each with its next step

    def missing(self, part: str) -> dict[int, str]:
        """Rank 0 waits until all have told `part`. Those who keep it waiting: where they stand."""
        silent, moved = set(range(self.size)), time.monotonic()
        before: dict[int, Any] = {}
        while True:
            told = {rank for rank in silent if self.store.check([f"{part}/{rank}"])}
            silent -= told
            failed = self.store.check(["failed"]) and time.monotonic() - moved > 1.0
            if not silent or failed:
                return {}
            stand = {rank: self.heard("at", rank) for rank in silent}
            if told or stand != before:
                before, moved = stand, time.monotonic()
            elif time.monotonic() - moved > self.patience:
                return _culprits(stand)
            time.sleep(_TICK)

    def fail(self) -> None:
        """This rank failed at something for which others need it; it has told what."""
        self.store.set("failed", b"")

    def end(self) -> None:
        """Rank 0 has heard enough."""
        self.store.set("over", b"")

    def await_end(self, works: Callable[[], bool]) -> bool:
        """Wait for that. False if rank 0 was not heard of for long after this rank had no work."""
        since = time.monotonic()
        while not self.store.check(["over"]):
            if works():
                since = time.monotonic()
            elif time.monotonic() - since > 3 * self.patience:
                return False
            time.sleep(_TICK)
        return True

    def leave(self, seconds: float) -> None:
        """What a rank does last. Rank 0, which may keep the store, goes after the others."""
        with suppress(dist.DistError, RuntimeError):
            gone = self.store.add("left", 1)
            limit = time.monotonic() + seconds
            while self.rank == 0 and gone < self.size and time.monotonic() < limit:
                time.sleep(_TICK)
                gone = self.store.add("left", 0)


def _culprits(stand: dict[int, Any]) -> dict[int, str]:
    """Of the ranks that have not told, those that keep the others waiting."""
    never = {rank: "did not come" for rank, at in stand.items() if at is None}
    if never:
        return never
    working = {rank: at for rank, at in stand.items() if not at[2]} or stand
    first = min(at[0] for at in working.values())
    return {rank: at[1] for rank, at in working.items() if at[0] == first}
