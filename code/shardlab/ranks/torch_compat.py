"""Two collectives with torch 2.13's names, for all torch versions, without deprecation warnings.

Both take the output first. Pass the group by name: `all_gather_single(out, x, group=group)`. They
are looked up at every call, because a run of ranks replaces collectives by logging ones.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def all_gather_single(*args: Any, **kwargs: Any) -> dist.Work | None:
    """Gather every rank's input, side by side, into the output."""
    return _get_collective("all_gather_single", "all_gather_into_tensor")(*args, **kwargs)


def reduce_scatter_single(*args: Any, **kwargs: Any) -> dist.Work | None:
    """Add up all ranks' inputs; each rank's output gets its part."""
    return _get_collective("reduce_scatter_single", "reduce_scatter_tensor")(*args, **kwargs)


def _get_collective(name: str, old_name: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, old_name)
