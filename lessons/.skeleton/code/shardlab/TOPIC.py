"""TITLE: what it does, in a sentence, and the paper that it comes from, with its section.

A skeleton, which takes the mean of numbers that are cut among ranks.
Names of tensors end in their shape. N: all numbers; n: those of one rank.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def mean(x_n: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of the numbers of all ranks, on every rank.

    x_n: this rank's numbers, [n], as many as every other rank has. Raises ValueError for none.
    """
    if not len(x_n):
        raise ValueError("x_n is empty: allowed are one number and more")
    total = x_n.sum()  # []
    dist.all_reduce(total, group=group)  # [], summed over the group
    return total / (len(x_n) * dist.get_world_size(group))


def predict(itemsize: int) -> int:
    """Bytes that a rank hands to the all-reduce: one number, however many it has."""
    return itemsize
