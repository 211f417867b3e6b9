"""What one rank of a checkpoint finds, all of them know, or raise: else the others would wait."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardlab import ranks
from shardlab.ranks.gather import gathered

from .folder import CheckpointError

# A process without ranks is fine here. A thread may be the one to warn: hence for good.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class Members:
    """The ranks that save and load together, in a group of their own.

    A save in the background sends messages at moments that nobody knows: in the group of training
    they would meet training's. The new one is gloo's, on the CPU. group: None is the world, as
    torch has it; a process without ranks is alone. timeout: seconds that a rank waits for another,
    by default the run's.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None = None):
        if timeout is not None:
            ranks.check_number(timeout=timeout)
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size, self._destroy = 0, 1, False
        if group is None:
            if not dist.is_initialized():
                return
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ValueError(f"group={group!r}: allowed are None or a group that holds this rank")
        self.rank, self.size = group.rank(), group.size()
        numbers = dist.get_process_group_ranks(group)
        # Without ranks that are no members, a group's name is made from its members, and after
        # it was destroyed the same members would wait for one another under that name.
        self._destroy = len(numbers) == dist.get_world_size()
        limit = ranks.agree.time_limit(group) if timeout is None else timedelta(seconds=timeout)
        self.group = dist.new_group(
            numbers, limit, backend="gloo", use_local_synchronization=not self._destroy
        )

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        return [value] if self.group is None else gathered(value, self.group)

    def check_same(self, **given: Any) -> None:
        """Raise ValueError, the same on all ranks, unless all were given the same."""
        if self.group is not None:
            ranks.check_same(self.group, **given)

    def first(self, act: Callable[[], Any]) -> Any:
        """What `act` returns or raises on rank 0, on every rank."""
        result = error = None
        if self.rank == 0:
            try:
                result = act()
            except Exception as raised:
                error = raised
        result, error = self.exchange((result, error))[0]
        if error is not None:
            try:
                raise error
            finally:
                del error  # else this frame and the error would keep each other, and a folder held
        return result

    def agree(self, problems: list[str], head: str = "") -> None:
        """Raise CheckpointError on every rank if one of them has found problems."""
        found = [text for part in self.exchange(problems) for text in part]
        if found:
            raise CheckpointError(head + "; ".join(dict.fromkeys(found)))

    def close(self) -> None:
        """Give the group back."""
        if self._destroy:
            dist.destroy_process_group(self.group)
        self.group, self._destroy = None, False
