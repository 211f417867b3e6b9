"""The exercises of lesson `tensor_types`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import ranks

from . import exercise, run_answer, same


def _share(answer: Callable[..., Any], x_N: Tensor) -> Any:
    """On a rank: the answer for its part of the numbers."""
    x_n = x_N.chunk(dist.get_world_size())[dist.get_rank()].to(ranks.device())
    result = answer(x_n, dist.group.WORLD)
    return result.cpu() if isinstance(result, Tensor) else result


@exercise("my_tensor_types")
def _(answer: Callable[..., Any]) -> str:
    x_N = torch.arange(12.0)
    for size in (2, 4):
        own = [part.mean() for part in x_N.chunk(size)]
        hints = {"That is the mean of this rank's numbers alone.": own}
        found = run_answer(_share, size, answer, x_N)
        same(found, [x_N.mean()] * size, "the mean", tolerance=1e-6, hints=hints)
    return "Equal to the mean of one process, on 2 and on 4 ranks."
