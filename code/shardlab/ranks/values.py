"""Values of any size in a store of torch's.

Processes of torchrun's meet in the store of their launcher: functions, arguments and results go
through it.
"""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

_CHUNK = 2**22  # bytes; the launcher's store takes no value of more than 8 MiB
FAILED = "failed"  # the key that says that a rank of this run has


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
