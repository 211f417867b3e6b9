"""Part 1: data parallelism. Every rank has a copy of the model, and its own part of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class DataParallel:
    """A copy of `module` on each rank of `group`, with the same weights and the same gradients.

    module: any module. Here, once, its parameters and buffers get the values that those of the
        group's first rank have. It is changed in place; its parameters stay the objects they are.
    group: a process group: of its ranks alone is spoken, and in it alone anything is sent.
    bucket_bytes: gradients travel together, in tensors of up to so many bytes. A gradient that is
        larger travels alone.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, bucket_bytes: int = 2**20
    ) -> None:
        raise NotImplementedError

    def __call__(self, *inputs: Any) -> Any:
        """What the module returns for these inputs."""
        raise NotImplementedError

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """What backward adds to the gradients inside of the block is not sent there."""
        raise NotImplementedError
        yield

    def finish(self) -> None:
        """Called after the last backward of a step: each gradient is then the group's average.

        What was added in `no_sync` is part of it. A rank that has no gradient for a parameter
        counts as zeros; where no rank has one, `grad` stays None. Frozen parameters have none.

        Sent in one step: what a ring all-reduce of the gradients sends, 2 (n - 1) / n times their
        bytes, and a few bytes for each parameter; in about as many calls as there are buckets.
        """
        raise NotImplementedError


def joined_loss(loss_sum: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's loss, where the ranks have unequally many samples.

    loss_sum: [], the sum over this rank's samples; count: how many they are, 0 on some rank maybe.
    Returns [], for backward. Where DataParallel averages, the gradients are those of the mean over
    all samples of all ranks.
    """
    raise NotImplementedError
