"""A store of torch's, with values of any size, in which nobody waits for a rank that failed.

Processes of torchrun's meet in the store of their launcher: functions, arguments and results go
through it, and so do the addresses from which a group is made.
"""

from __future__ import annotations

import io
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_CHUNK = 2**22  # bytes; the launcher's store takes no value of more than 8 MiB
FAILED = "failed"  # the key that says that a rank of this run has


def heedful(store: dist.Store) -> dist.Store:
    """The same store, for groups to be made through: nobody waits there once a rank has failed.

    torch's groups call it, but do not keep its Python side alive: who makes groups holds it for as
    long as there are any.
    """
    return _Heedful(store)


class _Heedful(dist.Store):
    def __init__(self, store: dist.Store):
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        limit = time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            if self._store.check([FAILED]):
                raise RuntimeError("connection closed: another rank of this run failed")
            if time.monotonic() > limit:
                raise RuntimeError(f"timed out: {', '.join(keys)} did not come")
            time.sleep(0.005)


def saved(value: Any) -> bytes:
    """`value`, as torch writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def loaded(data: bytes) -> Any:
    """What `saved` made bytes of; tensors come back on the CPU."""
    return torch.load(io.BytesIO(data), "cpu", weights_only=False)


def put(store: dist.Store, key: str, data: bytes) -> None:
    """Set `key` to `data`, in pieces."""
    pieces = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, str(len(pieces)))


def take(store: dist.Store, key: str) -> bytes:
    """What `put` has set `key` to, or will set it to."""
    return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))


def drop(store: dist.Store, key: str) -> None:
    """Free the memory of what `put` has set `key` to."""
    for number in range(int(store.get(key))):
        store.delete_key(f"{key}/{number}")
