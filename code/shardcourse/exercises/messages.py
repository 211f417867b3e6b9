"""Recorder of messages between two ranks in the order they begin, and a replay by nccl's rules."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Messages that a rank begins at once, each as ("send" or "recv", peer).
MessageBatch = list[tuple[str, int]]


class MessageRecorder(TorchDispatchMode):
    """Recorder of this rank's messages in the order they begin; a batch is one entry of the log.

    received_bytes: what this rank received; held_bytes: the most of it that it held at once.
    """

    def __enter__(self) -> MessageRecorder:
        self.log: list[MessageBatch] = []
        self.received_bytes = self.held_bytes = 0
        self._held: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._batch_isend_irecv, self._in_batch = dist.batch_isend_irecv, False
        dist.batch_isend_irecv = self._record_batch
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        dist.batch_isend_irecv = self._batch_isend_irecv
        super().__exit__(*error)

    def _record_batch(self, operations: list[dist.P2POp]) -> Any:
        self.log.append([])
        self._in_batch = True
        try:
            return self._batch_isend_irecv(operations)
        finally:
            self._in_batch = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(("c10d.send", "c10d.recv_")):
            if not self._in_batch:
                self.log.append([])
            self.log[-1].append(("send" if "send" in str(func) else "recv", args[2]))
            if "recv" in str(func):
                storage = args[0][0].untyped_storage()
                self._held[storage._cdata] = storage
                self.received_bytes += args[0][0].nbytes
                held = sum(one.nbytes() for one in self._held.values())
                self.held_bytes = max(self.held_bytes, held)
        return func(*args, **(kwargs or {}))


def has_deadlock(logs: list[list[MessageBatch]]) -> bool:
    """Return True if the ranks would deadlock with nccl.

    nccl connects two ranks at their first message, and both wait until that message is done.
    """
    todo = [[set(posted) for posted in log] for log in logs]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(todo):
            for kind, peer in list(mine[0]) if mine else ():
                other = "recv" if kind == "send" else "send"
                if todo[peer] and (other, rank) in todo[peer][0]:
                    mine[0].discard((kind, peer))
                    todo[peer][0].discard((other, rank))
                    moved = True
        for mine in todo:
            while mine and not mine[0]:
                mine.pop(0)
    return any(todo)
