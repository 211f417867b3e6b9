"""Cross-entropy over a vocabulary of which each rank has the logits of its own entries.

The loss of a token is log(sum of exp(logit)) - logit of its target. Both need all entries, but of
each rank only three numbers a token: its largest logit, its sum of exponentials, and the target's
logit, if that is one of its own. The [B, S, V] logits never exist on any rank.

Shoeybi et al. 2019 (arXiv 1909.08053), section 3. Shapes in names: B batch, S sequence, V
vocabulary, v this rank's share of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layers import check_entries, own_rows
from .operators import Group, ranks_in


def loss(logits_BSv: Tensor, targets_BS: Tensor, group: Group, reduction: str = "mean") -> Tensor:
    """Cross-entropy over all tokens, the same on all ranks; reduction "mean" or "sum".

    logits_BSv: of this rank's part of the vocabulary. targets_BS: numbers in the whole vocabulary,
    the same on all ranks. Logits of 16 bits are widened to float32. Two all-reduces, of [B, S] and
    [2, B, S]; backward sends nothing, because softmax - target is known for each entry where it is.
    Backward can be done once: it turns what forward kept into the gradient.

    Raises ValueError for other shapes, reductions, and (on the CPU; a GPU would have to be waited
    for, and gives nan) for targets that are not in the vocabulary.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: allowed are 'mean' and 'sum'")
    if logits_BSv.shape[:-1] != targets_BS.shape or targets_BS.is_floating_point():
        shape = list(logits_BSv.shape[:-1])
        what = (
            f"allowed are whole numbers of shape {shape}, as the logits' {list(logits_BSv.shape)}"
        )
        raise ValueError(f"targets={targets_BS.dtype} {list(targets_BS.shape)}: {what}")
    vocabulary = logits_BSv.shape[-1] * ranks_in(group)
    check_entries("targets", targets_BS, vocabulary)
    losses_BS = _CrossEntropy.apply(logits_BSv, targets_BS, group)
    if not targets_BS.is_cpu:
        outside_BS = (targets_BS < 0) | (targets_BS >= vocabulary)
        losses_BS = losses_BS.masked_fill(outside_BS, float("nan"))
    return losses_BS.mean() if reduction == "mean" else losses_BS.sum()


class _CrossEntropy(torch.autograd.Function):
    """The losses [B, S] of tokens. Keeps one tensor of the logits' shape, which becomes their
    gradient in place: backward can be done once.
    """

    @staticmethod
    def forward(ctx: Any, logits_BSv: Tensor, targets_BS: Tensor, group: Group) -> Tensor:
        width = logits_BSv.shape[-1]
        own = slice(dist.get_rank(group) * width, (dist.get_rank(group) + 1) * width)
        several = ranks_in(group) > 1
        narrow = logits_BSv.dtype in (torch.bfloat16, torch.float16)
        largest_BS1 = logits_BSv.amax(-1, keepdim=True)
        if narrow:
            largest_BS1 = largest_BS1.float()  # and so is all that is computed with it
        if several:
            dist.all_reduce(largest_BS1, dist.ReduceOp.MAX, group=group)  # [B, S, 1]
        own_BS1, elsewhere_BS1 = own_rows(targets_BS[..., None], own)
        target_BS1 = logits_BSv.gather(-1, own_BS1) - largest_BS1
        exp_BSv = (logits_BSv - largest_BS1).exp_()
        sums_2BS1 = torch.stack(
            (exp_BSv.sum(-1, keepdim=True), target_BS1.masked_fill_(elsewhere_BS1, 0))
        )
        if several:
            dist.all_reduce(sums_2BS1, group=group)  # [2, B, S, 1]
        sum_BS1, target_BS1 = sums_2BS1
        ctx.dtype = logits_BSv.dtype
        ctx.save_for_backward(exp_BSv, sum_BS1, own_BS1, elsewhere_BS1)
        return (sum_BS1.log() - target_BS1).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses_BS: Tensor) -> tuple[Tensor, None, None]:
        exp_BSv, sum_BS1, own_BS1, elsewhere_BS1 = ctx.saved_tensors
        scale_BS1 = dlosses_BS[..., None]
        softmax_BSv = exp_BSv.mul_(scale_BS1 / sum_BS1)  # of this rank's entries, scaled
        target_BS1 = scale_BS1.masked_fill(elsewhere_BS1, 0)
        return softmax_BSv.scatter_add_(-1, own_BS1, -target_BS1).to(ctx.dtype), None, None
