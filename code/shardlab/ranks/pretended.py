"""One rank of many, alone: a process group whose other ranks do not exist.

Its collectives return at once and move nothing, so what they return is not data. Shapes, sizes and
the order of things are right, and that is enough to ask what a rank of a large job would hold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def pretend(
    fn: Callable[..., Any], world_size: int, *args: Any, rank: int = 0, timeout: float = 120.0
) -> Any:
    """Call `fn(*args)` in one process that takes itself for `rank` of `world_size` ranks.

    The world may be of any size: nothing of it is there. Use fake or meta tensors for what would
    not fit (`torch._subclasses.FakeTensorMode`). Returns what `fn` returns; tensors need data then.
    Raises ValueError for a world or a rank that cannot be; RankError as `run` does.
    """
    from . import run

    size = operator.index(world_size)
    if size < 1:
        raise ValueError(f"world_size={world_size}: allowed is a whole number of at least 1")
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank}: allowed are 0 to {size - 1}")
    return run(_alone, 1, fn, size, rank, args, timeout=timeout, device="cpu")[0]


def _alone(fn: Callable[..., Any], world_size: int, rank: int, args: tuple[Any, ...]) -> Any:
    # The import tells torch of the backend "fake".
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    return fn(*args)
