"""Connections of nccl: made with the first message, while both ends' hosts wait.

A collective or a batch connects the whole group; a single message connects its pair, in a
communicator of the pair's own, where messages go one after another. A batch is one call: its
messages wait for their pairs together.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .machine import CARRIER, HERE, find, place

_made: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_batch = threading.local()


def backends(group: Any) -> Mapping[str, str]:
    """Return the backend for each kind of device."""
    config = dist.distributed_c10d._world.pg_backend_config.get(group, "")
    return dict(pair.split(":") for pair in str(config).split(",") if ":" in pair)


def make_connections(group: Any, name: str, args: Any, kwargs: Any) -> None:
    """Make the connections that this method of a group needs."""
    if name not in ("send", "recv"):
        return _connect(group, {"all": list(range(group.size()))}, name)
    peers = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, int)]
    pair = sorted((group.rank(), peers[0]))
    if not getattr(_batch, "inside", False):
        _connect(group, {f"pair {pair[0]}:{pair[1]}": pair}, name)
    return None


def _connect(group: Any, meetings: Mapping[str, list[int]], role: str) -> None:
    """Announce this rank for its new connections, then wait for the other ranks."""
    made = _made.setdefault(group, set())
    new = {name: members for name, members in meetings.items() if name not in made}
    made.update(new)
    me, store = group.rank(), dist.distributed_c10d._world.pg_map[group][1]
    seat = f"{os.environ.get('GROUP_RANK', 0)}/{HERE.current}"
    for name in new:
        store.set(f"rehearsal/{name}/{me}", f"{role} {seat}")
    for name, members in new.items():
        keys = {m: f"rehearsal/{name}/{m}" for m in members if m != me}
        try:
            store.wait(list(keys.values()), timedelta(seconds=HERE.patience))
        except Exception:
            absent = [m for m, key in keys.items() if not store.check([key])]
            _report_missing(group, name, me, absent, role)
        for other, key in keys.items():
            theirs, their_seat = store.get(key).decode().split()
            if their_seat == seat:
                text = f"Duplicate GPU detected: ranks {me} and {other} of a group are both on"
                find("group", f"{text} CUDA device {HERE.current}")
            if name.startswith("pair") and theirs == role:
                text = f"both ends of {name} in {_describe(group)} {role} first, on their own, at"
                text += f" {place()}: on a stream, each waits for what the other has queued behind"
                find("connection", text, Missed)


class Missed(Exception):
    """Error for two ends that do not connect: nccl would wait for ever."""


def _report_missing(group: Any, name: str, me: int, absent: list[int], role: str) -> None:
    who = "rank " + ", ".join(map(str, absent)) if absent else "somebody"
    text = f"{name} in {_describe(group)}: rank {me} waits in {role} at {place()}"
    find("connection", f"{text}, and {who} does not come within {HERE.patience:g} s", Missed)


def _describe(group: Any) -> str:
    return f"group {group.group_name!r} of ranks {dist.get_process_group_ranks(group)}"


def install() -> None:
    """Watch batches, and barriers, which connect a group that has nccl."""
    c10d, C = dist.distributed_c10d, dist.ProcessGroup
    plain_batch, plain_barrier = c10d.batch_isend_irecv, C.barrier

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        op = p2p_op_list[0] if p2p_op_list else None
        group = (op.group or dist.group.WORLD) if op else None
        if op is None or backends(group).get(op.tensor.device.type) != CARRIER:
            return plain_batch(p2p_op_list)
        meetings = {"all": list(range(group.size()))}
        for each in p2p_op_list:
            pair = sorted((group.rank(), each.group_peer))
            meetings[f"batch {pair[0]}:{pair[1]}"] = pair
        _connect(group, meetings, "batch")
        _batch.inside = True
        try:
            return plain_batch(p2p_op_list)
        finally:
            _batch.inside = False

    def barrier(self: Any, *args: Any, **kwargs: Any) -> Any:
        if CARRIER in backends(self).values():
            _connect(self, {"all": list(range(self.size()))}, "barrier")
        return plain_barrier(self, *args, **kwargs)

    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv
    C.barrier = barrier
