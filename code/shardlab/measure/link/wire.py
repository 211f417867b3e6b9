"""The clock of a rank's wire: when each queued transfer starts and ends.

On the CPU the data exists at the call, so all times are known at once. On a GPU the host runs ahead
of the data: the clock starts when the stream reaches the operation, at a time not known before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from shardlab.common import gpu


class ReadyTime:
    """The time at which the data of `tensors` is ready, in seconds of time.monotonic().

    On the CPU: now. On a GPU: when the current stream reaches this point, which an event marks.
    Another event, in an idle stream, marks the present, and the GPU measures the time between the
    two.
    """

    _idle: ClassVar[dict[torch.device, torch.Stream]] = {}

    def __init__(self, tensors: Any):
        self._now = time.monotonic()
        device = next((t.device for t in tree_leaves(tensors) if gpu.is_gpu(t.device)), None)
        self.is_known = device is None
        if device is not None:
            torch_gpu = gpu.get_device_module()
            with torch_gpu.device(device):
                if device not in self._idle:
                    self._idle[device] = torch_gpu.Stream()
                self._present = torch_gpu.Event(enable_timing=True)
                self._present.record(self._idle[device])
                self._reached = torch_gpu.Event(enable_timing=True)
                self._reached.record()

    def __call__(self) -> float:
        """Return the time, after waiting until it is known."""
        if not self.is_known:
            self._present.synchronize()
            self._reached.synchronize()
            self._now += max(0.0, self._present.elapsed_time(self._reached) / 1e3)
            self.is_known = True
        return self._now


@dataclass
class _Transfer:
    """A transfer in the queue of a wire."""

    ready: ReadyTime
    seconds: float
    on_start: Callable[[float, float], None]  # called with begin and end once they are known
    end: float | None = None


class Wire:
    """The outgoing wire of one rank."""

    def __init__(self) -> None:
        self._free_at = 0.0  # when it will be idle
        self._queue: deque[_Transfer] = deque()  # transfers whose begin is not known yet
        self._lock = threading.Lock()

    def queue_transfer(
        self, ready: ReadyTime, seconds: float, on_start: Callable[[float, float], None]
    ) -> Callable[[], float]:
        """Reserve the wire for `seconds`; return a function that returns the end of the transfer.

        This function waits for `ready`. On the CPU all is known, and `begun` is called, at once.
        """
        transfer = _Transfer(ready, seconds, on_start)
        self._queue.append(transfer)

        def get_end() -> float:
            with self._lock:
                while transfer.end is None:
                    self._start_transfer(self._queue.popleft())
                return transfer.end

        if ready.is_known and self._queue[0] is transfer:
            get_end()
        return get_end

    def _start_transfer(self, transfer: _Transfer) -> None:
        begin = max(transfer.ready(), self._free_at)
        transfer.end = self._free_at = begin + transfer.seconds
        transfer.on_start(begin, transfer.end)
