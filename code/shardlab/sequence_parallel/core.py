"""Megatron's sequence parallelism: what stands between the cut matrices is cut by tokens.

Tensor parallelism divides attention and the feed-forward network over t ranks, and leaves norms,
dropouts and the residual stream whole on every rank. They work on each token alone, so their tokens
can be shared out. At the two edges of a cut part stand then

    enter   all-gather along the sequence forward, reduce-scatter backward
    leave   reduce-scatter along the sequence forward, all-gather backward

in place of identity and all-reduce. An all-reduce is a reduce-scatter and an all-gather, so the
bytes on the wire are the same (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

What `enter` has gathered is an input of the cut matrices, whose backward needs it. Kept whole, it
would be the one large tensor that is not divided by t. So the share alone is kept, and gathered
once more in backward (`tensor_parallel` does it): one all-gather more for each place of entry, half
as many bytes again in backward. `AlongSequence(keep=True)` does without.

Shapes: B batch, S tokens in all, s = S/t of one rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardlab.data_parallel.buckets import add_up
from shardlab.ranks import check_group
from shardlab.ranks.gather import reduce_scatter
from shardlab.ranks.renamed import all_gather_single
from shardlab.tensor_types.operator import Operator

Finish = Callable[[], Tensor]


class _Enter(Operator):
    words = "V -> R"  # what x is on all ranks, and what it becomes: see tensor_types

    @staticmethod
    def forward(ctx: Any, x_BsH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x_BsH, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_BSH: Tensor) -> tuple[Tensor, None]:
        return _scatter(dx_BSH, ctx.group)(), None


class _Leave(Operator):
    words = "P -> V"

    @staticmethod
    def forward(ctx: Any, y_BSH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(y_BSH, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BsH: Tensor) -> tuple[Tensor, None]:
        return _gather(dy_BsH, ctx.group)(), None


def _gather(x_BsH: Tensor, group: dist.ProcessGroup) -> Finish:
    """Start to gather along the sequence; the result waits for it and returns [B, S, H]."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return lambda: x_BsH.clone()
    batch, local_seq, hidden = x_BsH.shape
    parts = x_BsH.new_empty((ranks * batch, local_seq, hidden))
    work = all_gather_single(parts, x_BsH.contiguous(), group=group, async_op=True)  # t [B, s, H]

    def finish() -> Tensor:
        work.wait()
        # Ranks come first in memory, sequences have to; one sequence is in order already.
        # (Megatron's tensors are [S, B, H], where there is never anything to copy.)
        return parts.view(ranks, batch, local_seq, hidden).transpose(0, 1).flatten(1, 2)

    return finish


def _scatter(y_BSH: Tensor, group: dist.ProcessGroup) -> Finish:
    """Start to add up over the ranks; the result returns the sum's [B, s, H] of this rank."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return lambda: y_BSH.clone()
    parts_tBsH = y_BSH.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    return reduce_scatter(parts_tBsH.flatten(0, 1), group)  # [t B, s, H] to [B, s, H]


class AlongSequence:
    """The edges that `tensor_parallel.parallelize(…, edges=…)` puts around what is cut.

    keep: hold on to what was gathered until backward is over, instead of gathering it again.
    """

    uncut = "R"  # norms and late biases see this rank's tokens alone: `sum_gradients` adds up

    def __init__(self, keep: bool = False):
        self.keep = keep

    def enter(self, x_BsH: Tensor, group: dist.ProcessGroup) -> Tensor:
        """All ranks' tokens, [B, S, H], from this rank's."""
        return _Enter.apply(x_BsH, group)

    def leave(self, y_BSH: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The sum of all ranks' y_BSH, but this rank's tokens alone, [B, s, H].

        Raises ValueError, before anything is sent, for a sequence that cannot be shared out.
        """
        _, ranks = check_group(group)
        check_seq(y_BSH.shape[1], ranks)
        return _Leave.apply(y_BSH, group)

    def begin(self, x_BsH: Tensor, group: dist.ProcessGroup) -> Finish:
        """Start what `enter` does forward; see `tensor_parallel.Edges`."""
        return _gather(x_BsH, group)

    def back(self, dx_BSH: Tensor, group: dist.ProcessGroup) -> Finish:
        """Start what `enter` does backward."""
        return _scatter(dx_BSH, group)

    def __repr__(self) -> str:
        return f"AlongSequence(keep={self.keep})"


ALONG_SEQUENCE = AlongSequence()


def check_seq(seq: int, ranks: int) -> None:
    """Raise ValueError for a sequence that the ranks cannot share."""
    if seq < 1 or seq % ranks:
        raise ValueError(f"seq={seq}: allowed are multiples of the {ranks} ranks")


PLAIN = nn.LayerNorm, nn.RMSNorm, nn.Linear  # what tensor parallelism leaves as it is


def seen_partly(model: nn.Module) -> list[nn.Parameter]:
    """What is whole on every rank, but worked on this rank's tokens alone.

    Norms, what makes latents, and the biases that are added after `leave`. Modules that tensor
    parallelism has cut say in `cut` which of their parameters are; raises ValueError for a model
    that has none of them.
    """
    modules = list(model.modules())
    if not any(hasattr(module, "cut") for module in modules):
        raise ValueError(
            "model: no part of it is cut by tensor parallelism; allowed is what "
            "tensor_parallel.parallelize(model, group, edges=ALONG_SEQUENCE) returns"
        )
    found: dict[nn.Parameter, None] = {}
    for module in modules:
        cut = getattr(module, "cut", None)
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, PLAIN) or (cut and name not in cut):
                found[parameter] = None
    return list(found)


def sum_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """After backward: add up, over the ranks, the gradients of what saw its own rank's tokens.

    model: one with `ALONG_SEQUENCE` around its cut parts; `seen_partly` are meant. One all-reduce
    for each dtype among them. All ranks went the same way through the model, so they have the same
    gradients to add.
    """
    _, ranks = check_group(group)
    gradients = [p.grad for p in seen_partly(model) if p.grad is not None]
    if ranks > 1:
        add_up(gradients, group, joined=True)
