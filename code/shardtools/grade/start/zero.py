"""Part 2: ZeRO. Gradients are averaged, and each rank keeps a shard of the optimizer's states."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn


class ZeroOptimizer:
    """An optimizer on averaged gradients, equal to a plain one, with sharded states.

    parameters: the same ones, with the same values, on each rank of `group`. Frozen ones are left
        alone.
    group: the process group that shares the work: all ranks here are its ranks.
    make: makes a plain optimizer of a list of tensors. It treats each number by itself, as AdamW
        does, so that it may be given pieces of parameters. Call it once.

    A rank's states are those of its shard: of N numbers, N / n rounded up; with pieces that are cut
    parameter by parameter, rounded up for each of them.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        raise NotImplementedError

    def step(self, max_norm: float | None = None) -> float | None:
        """Average the gradients over the group, update, and give all ranks all new weights.

        Before: each rank has its own `grad` in each parameter; None counts as zeros. After:
        parameters have the same new values on all ranks, as from one optimizer that has all states.

        max_norm: clips the average, over all parameters, as torch.nn.utils.clip_grad_norm_ does,
            with its 1e-6.
        Returns the norm before clipping, the same on all ranks, or None without max_norm.

        Sent in one step: as much as a reduce-scatter of gradients and an all-gather of weights
        send on a ring, (n - 1) / n of their bytes each; two calls for each parameter, at most.
        """
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to None."""
        raise NotImplementedError
