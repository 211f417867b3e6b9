"""The loss of logits that are cut by vocabulary: three numbers per token are sent.

Shoeybi et al. 2019 (arXiv 1909.08053), section 3.

Shapes in names: B batch, S sequence, v this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardlab.common.arguments import check_one_of
from shardlab.gpt.model import IGNORED
from shardlab.ranks import check_group, check_same_once
from shardlab.tensor_types.operator import Operator

Group = dist.ProcessGroup


def to_local_rows(numbers: Tensor, row_slice: slice) -> tuple[Tensor, Tensor]:
    """Return the rows of `numbers` in this rank's part, and a mask of those elsewhere (row 0)."""
    rows = numbers - row_slice.start
    elsewhere = (rows < 0) | (numbers >= row_slice.stop)
    return rows.masked_fill_(elsewhere, 0), elsewhere


def check_entries(name: str, numbers: Tensor, vocabulary: int) -> None:
    """Raise ValueError if there are `numbers` on the CPU that are not in the vocabulary."""
    if numbers.is_cpu and type(numbers) is Tensor:  # fake tensors have no data
        outside = (numbers < 0) | (numbers >= vocabulary)
        if outside.any():
            wrong = int(numbers[outside][0])
            raise ValueError(f"{name}: must be 0 to {vocabulary - 1}, but one is {wrong}")


class _CrossEntropy(Operator):
    """The losses [B, S] of tokens: log(sum of exp(logit)) - logit of the target; 0 if ignored.

    mean: divide each loss by the number of tokens that are not ignored.

    Each rank contributes three numbers per token. Saves one tensor of the logits' shape, which
    becomes their gradient in place, so backward can run only once.
    """

    signature = "V, R -> I"

    @staticmethod
    def forward(
        ctx: Any, logits_BSv: Tensor, targets_BS: Tensor, group: Group, mean: bool
    ) -> Tensor:
        rank, ranks = check_group(group)
        width = logits_BSv.shape[-1]
        largest_BS1 = logits_BSv.amax(-1, keepdim=True)
        if logits_BSv.dtype in (torch.bfloat16, torch.float16):
            largest_BS1 = largest_BS1.float()  # and everything computed from it
        if ranks > 1:
            dist.all_reduce(largest_BS1, dist.ReduceOp.MAX, group=group)  # [B, S, 1]
        own = slice(rank * width, (rank + 1) * width)
        own_BS1, elsewhere_BS1 = to_local_rows(targets_BS[..., None], own)
        target_BS1 = logits_BSv.gather(-1, own_BS1) - largest_BS1
        target_BS1 = target_BS1.masked_fill_(elsewhere_BS1, 0)  # one rank has the target
        exp_BSv = (logits_BSv - largest_BS1).exp_()
        sums_2BS1 = torch.stack((exp_BSv.sum(-1, keepdim=True), target_BS1))
        if ranks > 1:
            dist.all_reduce(sums_2BS1, group=group)  # [2, B, S, 1]
        sum_BS1, target_BS1 = sums_2BS1
        losses_BS1 = sum_BS1.log() - target_BS1
        weight_BS1 = target_BS1.copy_((targets_BS != IGNORED)[..., None])  # reuses memory
        if mean:
            weight_BS1 /= weight_BS1.sum()
        ctx.dtype = logits_BSv.dtype
        ctx.save_for_backward(exp_BSv, sum_BS1, own_BS1, elsewhere_BS1, weight_BS1)
        return (losses_BS1 * weight_BS1).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses_BS: Tensor) -> tuple[Tensor, None, None, None]:
        exp_BSv, sum_BS1, own_BS1, elsewhere_BS1, weight_BS1 = ctx.saved_tensors
        scale_BS1 = dlosses_BS[..., None] * weight_BS1
        softmax_BSv = exp_BSv.mul_(scale_BS1 / sum_BS1)  # of this rank's entries, scaled
        target_BS1 = scale_BS1.masked_fill(elsewhere_BS1, 0)
        return softmax_BSv.scatter_add_(-1, own_BS1, -target_BS1).to(ctx.dtype), None, None, None


def vocab_parallel_loss(
    logits_BSv: Tensor, targets_BS: Tensor, group: Group, reduction: str = "mean"
) -> Tensor:
    """Return the cross-entropy over all tokens, the same on all ranks; reduction "mean" or "sum".

    logits_BSv: this rank's part of the vocabulary. targets_BS: indices into the whole vocabulary,
    or IGNORED, the same on all ranks. 16-bit logits are widened to float32. Sends two all-reduces,
    of [B, S] and [2, B, S]; backward, which can run only once, sends nothing, because each rank
    knows softmax - target for its own entries. The [B, S, V] logits never exist on any rank.

    Raises ValueError for other reductions, and on the CPU for targets outside the vocabulary; on a
    GPU, which would have to be waited for, these give nan.
    """
    check_one_of(("mean", "sum"), reduction=reduction)
    vocabulary = logits_BSv.shape[-1] * check_group(group)[1]
    counts_BS = targets_BS != IGNORED
    check_entries("targets", targets_BS * counts_BS, vocabulary)
    check_same_once(group, "tensor_parallel.vocab_parallel_loss", group, reduction=reduction)
    losses_BS = _CrossEntropy.apply(logits_BSv, targets_BS, group, reduction == "mean")
    if not targets_BS.is_cpu:
        outside_BS = ((targets_BS < 0) & counts_BS) | (targets_BS >= vocabulary)
        losses_BS = losses_BS.masked_fill(outside_BS, float("nan"))
    return losses_BS.sum()
