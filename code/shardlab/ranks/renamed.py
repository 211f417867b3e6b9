"""Two collectives under the names that torch 2.13 gave them: older ones warn there, or are alone.

Both take the output first. The group is to be named: `all_gather_single(out, x, group=group)`.
They are looked up at every call: a run of ranks logs its collectives, and has put others there.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def all_gather_single(*args: Any, **kwargs: Any) -> dist.Work | None:
    """Every rank's input, side by side in the output."""
    return _either("all_gather_single", "all_gather_into_tensor")(*args, **kwargs)


def reduce_scatter_single(*args: Any, **kwargs: Any) -> dist.Work | None:
    """The sum of all ranks' inputs; each rank's output gets its part."""
    return _either("reduce_scatter_single", "reduce_scatter_tensor")(*args, **kwargs)


def _either(name: str, older: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, older)
