"""When each pass of a step begins and ends, as measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .actions import Action
from .simulate import Span


class Clock:
    """Notes begin and end of passes, in seconds since a moment that all ranks share.

    That moment is the end of a barrier, which ranks leave within a fraction of a millisecond. On a
    GPU the times are those of the stream, where the work is done, and not of the calls.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup):
        self.device, self.group = device, group
        self._noted: list[tuple[Action, Any, Any]] = []

    def start(self) -> None:
        """Begin to count, all ranks at once."""
        self._idle()
        dist.barrier(group=self.group)
        self._noted = []
        self._start = self._now()

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        """Note the time that passes inside."""
        begin = self._now()
        yield
        self._noted.append((action, begin, self._now()))

    def spans(self) -> list[Span]:
        """What was noted since `start`."""
        self._idle()
        return [Span(*a, self._seconds(begin), self._seconds(end)) for a, begin, end in self._noted]

    def _idle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        if self.device.type != "cuda":
            return moment - self._start
        return self._start.elapsed_time(moment) / 1e3
