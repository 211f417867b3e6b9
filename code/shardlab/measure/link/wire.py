"""The clock of a rank's wire: when what is lined up on it sets off, and when it is through.

On the CPU, what is handed over is there, and all is known at once. On a GPU the host runs ahead of
the data: the clock starts when the stream comes to the operation, which nobody knows before.
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


class Moment:
    """When the data of `tensors` is there, in seconds of time.monotonic().

    Now, on the CPU. On a GPU, when the current stream comes to this point, which an event marks.
    Another one, in a stream that has nothing to do, marks the present, and the GPU counts the time
    from one to the other.
    """

    _idle: ClassVar[dict[torch.device, torch.Stream]] = {}

    def __init__(self, tensors: Any):
        self._now = time.monotonic()
        device = next((t.device for t in tree_leaves(tensors) if gpu.is_on(t.device)), None)
        self.known = device is None
        if device is not None:
            torch_gpu = gpu.module()
            with torch_gpu.device(device):
                if device not in self._idle:
                    self._idle[device] = torch_gpu.Stream()
                self._present = torch_gpu.Event(enable_timing=True)
                self._present.record(self._idle[device])
                self._reached = torch_gpu.Event(enable_timing=True)
                self._reached.record()

    def __call__(self) -> float:
        """It; waits until it is known."""
        if not self.known:
            self._present.synchronize()
            self._reached.synchronize()
            self._now += max(0.0, self._present.elapsed_time(self._reached) / 1e3)
            self.known = True
        return self._now


@dataclass
class _Load:
    """What is to leave, behind whatever was lined up before."""

    ready: Moment
    seconds: float
    begun: Callable[[float, float], None]  # called with begin and end once they are known
    end: float | None = None


class Wire:
    """One rank's wire out."""

    def __init__(self) -> None:
        self._free = 0.0  # when it will be idle
        self._line: deque[_Load] = deque()  # of which it is not known when they begin
        self._lock = threading.Lock()

    def line_up(
        self, ready: Moment, seconds: float, begun: Callable[[float, float], None]
    ) -> Callable[[], float]:
        """Keep the wire busy for `seconds`; returns what tells when that is over.

        Whoever asks for it waits for `ready`. On the CPU all is known, and `begun` called, at once.
        """
        load = _Load(ready, seconds, begun)
        self._line.append(load)

        def end() -> float:
            with self._lock:
                while load.end is None:
                    self._set_off(self._line.popleft())
                return load.end

        if ready.known and self._line[0] is load:
            end()
        return end

    def _set_off(self, load: _Load) -> None:
        begin = max(load.ready(), self._free)
        load.end = self._free = begin + load.seconds
        load.begun(begin, load.end)
