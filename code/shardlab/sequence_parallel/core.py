"""Megatron's sequence parallelism: activations between the sharded matrices are sharded by tokens.

Tensor parallelism divides attention and the feed-forward network over t ranks, and replicates
norms, dropouts and the residual stream on every rank. They treat each token independently, so their
tokens can be sharded. The two edges of a tensor-parallel part then are

    enter_region   all-gather along the sequence forward, reduce-scatter backward
    leave_region   reduce-scatter along the sequence forward, all-gather backward

in place of identity and all-reduce. An all-reduce is a reduce-scatter and an all-gather, so the
number of bytes sent is the same (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

The tensor that `enter_region` gathers is an input of the sharded matrices, whose backward needs it.
Kept whole, it would be the only large activation not divided by t. So each rank keeps its shard and
gathers it again in backward: one more all-gather for each `enter_region`, and 50 % more bytes in
backward. `SequenceShardedEdges(keep_entered=True)` keeps the gathered tensor instead.

Shapes: B batch, S tokens in all, s = S/t of one rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardlab.data_parallel.buckets import all_reduce_gradients
from shardlab.ranks import check_group
from shardlab.ranks.gather import reduce_scatter
from shardlab.ranks.torch_compat import all_gather_single
from shardlab.tensor_types.operator import Operator

WaitFn = Callable[[], Tensor]


class _GatherSequence(Operator):
    signature = "V -> R"  # types of the input and the output over the ranks: see tensor_types

    @staticmethod
    def forward(ctx: Any, x_BsH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _start_all_gather(x_BsH, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_BSH: Tensor) -> tuple[Tensor, None]:
        return _start_reduce_scatter(dx_BSH, ctx.group)(), None


class _ReduceScatterSequence(Operator):
    signature = "P -> V"

    @staticmethod
    def forward(ctx: Any, y_BSH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _start_reduce_scatter(y_BSH, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BsH: Tensor) -> tuple[Tensor, None]:
        return _start_all_gather(dy_BsH, ctx.group)(), None


def _start_all_gather(x_BsH: Tensor, group: dist.ProcessGroup) -> WaitFn:
    """Start an all-gather along the sequence; return a function that waits for [B, S, H]."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return lambda: x_BsH.clone()
    batch, local_seq, hidden = x_BsH.shape
    parts = x_BsH.new_empty((ranks * batch, local_seq, hidden))
    work = all_gather_single(parts, x_BsH.contiguous(), group=group, async_op=True)  # t [B, s, H]

    def wait_and_reorder() -> Tensor:
        work.wait()
        # [t, B, s, H] must become [B, t, s, H], which copies unless B is 1.
        # (Megatron's tensors are [S, B, H], an order that never needs this copy.)
        return parts.view(ranks, batch, local_seq, hidden).transpose(0, 1).flatten(1, 2)

    return wait_and_reorder


def _start_reduce_scatter(y_BSH: Tensor, group: dist.ProcessGroup) -> WaitFn:
    """Start a reduce-scatter of the sum; return a function that waits for this rank's [B, s, H]."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return lambda: y_BSH.clone()
    parts_tBsH = y_BSH.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    return reduce_scatter(parts_tBsH.flatten(0, 1), group)  # [t B, s, H] to [B, s, H]


class SequenceShardedEdges:
    """Communication at the edges of tensor-parallel parts, sharded along the sequence.

    Passed to `tensor_parallel.parallelize(…, edges=…)`. keep_entered: keep the gathered input until
    backward instead of gathering it again.
    """

    uncut_type = "R"  # replicated parameters see only this rank's tokens: use `sum_gradients`

    def __init__(self, keep_entered: bool = False):
        self.keep_entered = keep_entered

    def enter_region(self, x_BsH: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather all ranks' tokens, [B, S, H], from each rank's [B, s, H]."""
        return _GatherSequence.apply(x_BsH, group)

    def leave_region(self, y_BSH: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return this rank's tokens, [B, s, H], of the sum of all ranks' y_BSH.

        Raises ValueError, before any communication, for a sequence that cannot be divided equally.
        """
        _, ranks = check_group(group)
        check_seq(y_BSH.shape[1], ranks)
        return _ReduceScatterSequence.apply(y_BSH, group)

    def start_enter(self, x_BsH: Tensor, group: dist.ProcessGroup) -> WaitFn:
        """Start the all-gather of `enter_region`; see `tensor_parallel.Edges`."""
        return _start_all_gather(x_BsH, group)

    def start_enter_backward(self, dx_BSH: Tensor, group: dist.ProcessGroup) -> WaitFn:
        """Start the reduce-scatter of the backward of `enter_region`."""
        return _start_reduce_scatter(dx_BSH, group)

    def __repr__(self) -> str:
        return f"SequenceShardedEdges(keep_entered={self.keep_entered})"


SEQUENCE_SHARDED = SequenceShardedEdges()


def check_seq(seq: int, ranks: int) -> None:
    """Raise ValueError for a sequence that cannot be divided equally over the ranks."""
    if seq < 1 or seq % ranks:
        raise ValueError(f"seq={seq}: must be a multiple of the {ranks} ranks")


REPLICATED_MODULES = nn.LayerNorm, nn.RMSNorm, nn.Linear  # by tensor parallelism


def find_partial_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Return the replicated parameters whose gradients cover only this rank's tokens.

    These are norms, the projections to latents, and biases added after `leave_region`. Sharded
    modules have `shard_dims`. Raises ValueError for a model without such modules.
    """
    modules = list(model.modules())
    if not any(hasattr(module, "shard_dims") for module in modules):
        raise ValueError(
            "model: has no tensor-parallel layers: must be what "
            "tensor_parallel.parallelize(model, group, edges=SEQUENCE_SHARDED) returns"
        )
    found: dict[nn.Parameter, None] = {}
    for module in modules:
        sharded = getattr(module, "shard_dims", None)
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, REPLICATED_MODULES) or (sharded and name not in sharded):
                found[parameter] = None
    return list(found)


def sum_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients that `find_partial_gradients` lists over the ranks, after backward.

    model: parallelized with `edges=SEQUENCE_SHARDED`. Sends one all-reduce per dtype. The ranks
    must have run the same modules, so that they have gradients of the same parameters.
    """
    _, ranks = check_group(group)
    gradients = [p.grad for p in find_partial_gradients(model) if p.grad is not None]
    if ranks > 1:
        all_reduce_gradients(gradients, group, coalesce=True)
