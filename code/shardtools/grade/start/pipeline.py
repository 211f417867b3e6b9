"""Part 4: a pipeline. Each rank of a group has a stage of the model: rank r has stage r of n."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def train_step(
    stage: nn.Module,
    group: dist.ProcessGroup,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    inputs: Sequence[Tensor] | None,
    targets: Sequence[Tensor] | None,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Tensor | None:
    """Run forward and backward of all micro-batches, in 1F1B order.

    stage: this rank's stage, called once for each micro-batch; maybe frozen, or without parameters.
    shapes: for each micro-batch the shape that any stage sends to the next one; they may differ.
    dtype: the dtype of these tensors.
    inputs: inputs of the micro-batches, on the first stage; tokens, maybe. None on the others.
    targets: targets of the micro-batches, on the last stage. None on the others.
    loss: of the last stage's output and the targets, a micro-batch's part of the step's loss.

    Adds the gradients of the sum of all these losses to `grad` of the stage's parameters. Returns
    the sum on the last stage, without a graph, and None on the others.

    Sent: for each micro-batch one message from each stage to the next, and one back, of those
    shapes; nothing else. At no time has rank r of n more than n - r micro-batches whose forward is
    done and whose backward is not: their activations take memory.
    """
    raise NotImplementedError
