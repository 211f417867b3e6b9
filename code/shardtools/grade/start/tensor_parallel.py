"""Part 3: tensor parallelism. Each rank of a group has a part of every matrix; n ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn


class ColumnLinear(nn.Module):
    """A linear layer of whose outputs each rank computes 1 / n: those of the group's rank r are
    the r-th part.

    linear: the whole layer, the same on all ranks. Of it `weight` [out / n, in] and `bias`
        [out / n], or None, become parameters here, and are trained if those of `linear` are.

    Raises ValueError where n does not divide `out`.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in], the same on all ranks. Returns [..., out / n], without sending anything.

        Backward gives x the gradient of the whole layer, on all ranks; where x wants one, that
        sends what a ring all-reduce of it sends, else nothing.
        """
        raise NotImplementedError


class RowLinear(nn.Module):
    """A linear layer of whose inputs each rank has 1 / n.

    linear: the whole layer, the same on all ranks. Of it `weight` [out, in / n] and `bias` [out],
        or None, become parameters here, and are trained if those of `linear` are.

    Raises ValueError where n does not divide `in`.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in / n], the rank's own part. Returns [..., out], the same on all ranks.

        Sends what a ring all-reduce of the output sends; nothing in backward.
        """
        raise NotImplementedError


def cross_entropy(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup, ignore_index: int = -100
) -> Tensor:
    """The mean cross-entropy of tokens whose logits are cut along the vocabulary.

    logits: [tokens, vocab / n], the rank's own part; of any size, 1e4 for instance.
    targets: [tokens], numbers in the whole vocabulary, the same on all ranks. Those that are
        `ignore_index` do not count; some others there always are.
    Returns [], the same on all ranks; backward gives the logits their gradient, and sends nothing.
    Forward sends some numbers for each token, never the logits.
    """
    raise NotImplementedError
