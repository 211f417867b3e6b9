"""Cells of several pages run beside each other; a cell that measures runs while no other one does.

Whoever asks first goes first: a cell that measures waits for those that run, and those that come
after it wait for it, so nobody is overtaken for ever. All of it happens in one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Who may run just now."""

    def __init__(self) -> None:
        self._door = asyncio.Lock()  # whoever came first gets it first
        self._running, self._none = 0, asyncio.Event()
        self._none.set()

    @asynccontextmanager
    async def turn(self, alone: bool) -> AsyncIterator[None]:
        """Wait for a turn and hold it within the block. `alone`: while nobody else holds one."""
        async with self._door:
            if alone:
                await self._none.wait()
                yield  # and the door stays closed
                return
            self._running += 1
            self._none.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._none.set()
