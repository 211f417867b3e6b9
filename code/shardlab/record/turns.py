"""Cells of several pages run beside each other; a cell that measures runs while no other one does.

Whoever asks first goes first: a cell that measures waits for those that run, and those that come
after it wait for it, so nobody is overtaken for ever. All of it happens in one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Who may run just now."""

    def __init__(self) -> None:
        self._queue: deque[tuple[bool, asyncio.Future[None]]] = deque()
        self._running = 0
        self._alone = False  # there is one that runs, and it measures

    @asynccontextmanager
    async def turn(self, alone: bool) -> AsyncIterator[None]:
        """Wait for a turn and hold it within the block. `alone`: while nobody else holds one."""
        mine = asyncio.get_running_loop().create_future()
        self._queue.append((alone, mine))
        self._admit()
        try:
            await mine
            yield
        finally:
            if not mine.cancelled():
                self._running -= 1
                self._alone = False
            self._admit()

    def _admit(self) -> None:
        while self._queue:
            alone, mine = self._queue[0]
            if not mine.cancelled():
                if self._alone or (alone and self._running):
                    return
                self._running += 1
                self._alone = alone
                mine.set_result(None)
            self._queue.popleft()
