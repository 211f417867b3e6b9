"""Part 3: tensor parallelism. Each of a group's n ranks has a shard of every matrix."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn


class ColumnLinear(nn.Module):
    """A linear layer whose outputs are split over ranks: rank r computes the r-th of n parts.

    linear: the whole layer, the same on all ranks. Parts of it, `weight` [out / n, in] and `bias`
        [out / n] or None, become parameters here, trained if those of `linear` are.

    Raises ValueError if n does not divide `out`.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part, [..., out / n]; x: [..., in], equal on all ranks. Sends nothing.

        Backward gives x the gradient of the whole layer, on all ranks. If x needs a gradient, that
        sends as much as a ring all-reduce of it; else nothing.
        """
        raise NotImplementedError


class RowLinear(nn.Module):
    """A linear layer whose inputs are split over ranks: each has 1 / n of them.

    linear: the whole layer, the same on all ranks. Parts of it, `weight` [out, in / n], and `bias`
        [out] or None, become parameters here, trained if those of `linear` are.

    Raises ValueError if n does not divide `in`.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, [..., out], equal on all ranks; x: [..., in / n], the rank's part.

        Sends as much as a ring all-reduce of the output; nothing in backward.
        """
        raise NotImplementedError


def cross_entropy(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy of tokens whose logits are cut along the vocabulary.

    logits: [tokens, vocab / n], the rank's own part; of any size, 1e4 for instance.
    targets: [tokens], numbers in the whole vocabulary, the same on all ranks. Targets that are
        `ignore_index` do not count; at least one other target is always there.
    Returns [], the same on all ranks; backward gives the logits their gradient, and sends nothing.
    Forward sends some numbers for each token, never the logits.
    """
    raise NotImplementedError
