"""One rank of many, alone: a process group whose other ranks do not exist.

Its collectives return at once and move nothing, so what they return is not data. Shapes, sizes and
the order of things are right, and that is enough to ask what a rank of a large job would hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def alone(fn: Callable[..., Any], world_size: int, rank: int, args: tuple[Any, ...]) -> Any:
    """What `fn(*args)` returns in this process, as `rank` of a world whose others are not there."""
    # The import tells torch of the backend "fake".
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    return fn(*args)
