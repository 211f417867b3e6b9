"""Part 1: data parallelism. Every rank has a copy of the model, and its own part of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class DataParallel:
    """A copy of `module` on each rank of `group`, with the same weights and the same gradients.

    module: any module. On construction its parameters and buffers get the values of the group's
        first rank. It is changed in place; its parameters stay the same objects.
    group: a process group: "ranks" below are its ranks, and nothing is sent outside it.
    bucket_bytes: gradients are sent together, in tensors of up to so many bytes, larger ones alone.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, bucket_bytes: int = 2**20
    ) -> None:
        raise NotImplementedError

    def __call__(self, *inputs: Any) -> Any:
        """Return the module's output for these inputs."""
        raise NotImplementedError

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate gradients in this block without sending them."""
        raise NotImplementedError
        yield

    def finish(self) -> None:
        """Average the gradients over the group, after the last backward of a step.

        This includes gradients from `no_sync`. A rank that has no gradient for a parameter counts
        as zeros; where no rank has one, `grad` stays None. Frozen parameters have none.

        Sent in one step: as much as a ring all-reduce of the gradients sends, 2 (n - 1) / n times
        their bytes, and a few bytes for each parameter; in about as many calls as there are
        buckets.
        """
        raise NotImplementedError


def joined_loss(loss_sum: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's loss, [], for backward, if ranks have different numbers of samples.

    loss_sum: [], the sum over this rank's samples; count: their number, which may be 0 on some
    ranks. After DataParallel averages, the gradients are those of the mean over all ranks' samples.
    """
    raise NotImplementedError
