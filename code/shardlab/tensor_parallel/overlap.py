"""The first layers of a region as one autograd node, to overlap its backward's communication.

Queries, keys and values share their input x, and so do up and gate. Backward computes the gradient
of x, which is summed over all ranks and for which earlier layers wait, and those of the weights,
for which nothing waits. So the gradient of x is computed and sent first, and the others meanwhile.
Megatron-LM does the same for one matrix.

The result is that of `enter_region` and the single layers, for any operators at the region's edges.
Shapes in names: N tokens (batch times sequence), I inputs, o this rank's share of the outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardlab.ranks import check_group
from shardlab.tensor_types.operator import Operator

Group = dist.ProcessGroup
Edge = Callable[[Tensor, Group], Tensor]
WaitFn = Callable[[], Tensor]


@dataclass(frozen=True)
class Edges:
    """The two operators at the edges of a region, through which activations enter and leave.

    `enter_region` precedes an attention, a feed-forward network or the head; `leave_region` follows
    the last product of a region, and the embedding, and may overwrite its input.

    start_enter, start_enter_backward: start the communication of `enter_region` in forward and in
    backward (which may overwrite its input), and return a function that waits for the result. With
    them communication and computation overlap; None: they run one after the other. keep_entered:
    save the entered tensor for backward; otherwise save its input, which enters again in backward.
    uncut_type: type of unsharded parameters over the ranks (`tensor_types`).
    """

    enter_region: Edge
    leave_region: Edge
    start_enter: Callable[[Tensor, Group], WaitFn] | None = None
    start_enter_backward: Callable[[Tensor, Group], WaitFn] | None = None
    keep_entered: bool = True
    uncut_type: str = "I"


def start_identity(x: Tensor, _: Group) -> WaitFn:
    """Return `x`: the `start_enter` for activations that all ranks have, which sends nothing."""
    return lambda: x


def start_all_reduce(dx: Tensor, group: Group) -> WaitFn:
    """Start to all-reduce `dx` in place: `start_enter_backward` for replicated activations."""
    if group.size() == 1:
        return lambda: dx
    work = dist.all_reduce(dx, group=group, async_op=True)  # of dx's shape

    def wait_for_sum() -> Tensor:
        work.wait()
        return dx

    return wait_for_sum


class SharedInput:
    """Column-parallel layers that share an input x, which enters the region once for all of them.

    The first layer called with an x computes all outputs; the others, called with the same x, take
    theirs. A layer that is called with another x computes all anew.
    """

    def __init__(self, layers: Sequence[nn.Module], group: Group, edges: Edges):
        """Register this object with `layers`, which have a weight and a bias (or None)."""
        self.layers = [weakref.ref(layer) for layer in layers]  # they refer to this object
        self.group, self.edges = group, edges
        self.x: Tensor | None = None  # the input of `outputs`
        self.outputs: dict[nn.Module, Tensor] = {}  # by layer: outputs not yet taken
        for layer in layers:
            layer.shared_input = self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy of the model, which has layers of its own."""
        layers = [reference() for reference in self.layers]
        return {"layers": layers, "group": self.group, "edges": self.edges}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy; outputs kept between two layers' calls are not copied."""
        self.layers = [weakref.ref(layer) for layer in state["layers"]]
        self.group, self.edges, self.x, self.outputs = state["group"], state["edges"], None, {}

    def take_output(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the output [..., o] of `layer` for x [..., I]."""
        if x is not self.x or layer not in self.outputs:
            layers = [reference() for reference in self.layers]
            outputs = self._compute_outputs(x, layers)
            self.x, self.outputs = x, dict(zip(layers, outputs, strict=True))
        y = self.outputs.pop(layer)
        if not self.outputs:
            self.x = None  # release x
        return y

    def _compute_outputs(self, x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
        weights, biases = zip(*map(get_weights, layers), strict=True)
        if self.edges.start_enter is not None:
            return apply_columns(x, weights, biases, self.group, self.edges)
        entered = self.edges.enter_region(x, self.group)
        return [F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True)]


def apply_columns(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    edges: Edges,
) -> tuple[Tensor, ...]:
    """Return enter_region(x) @ weight.T + bias, [..., o], for x [..., I] and each weight [o, I]."""
    return _Columns.apply(x, group, edges, *weights, *biases)


class _Columns(Operator):
    @staticmethod
    def forward_unfused(x: Tensor, group: Group, edges: Edges, *parameters: Tensor | None) -> Any:
        """Compute the same with operators that `tensor_types` knows, one after the other."""
        entered = edges.enter_region(x, group)
        pairs = zip(*_split_in_half(parameters), strict=True)
        return tuple(F.linear(entered, w, b) for w, b in pairs)

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, edges: Edges, *parameters: Tensor | None) -> Any:
        weights, biases = _split_in_half(parameters)
        entered = edges.start_enter(x, group)()
        ys = tuple(F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True))
        kept = entered if edges.keep_entered else x
        ctx.save_for_backward(kept.to(ys[0].dtype), *weights)  # autocast's dtype, if any
        ctx.group, ctx.edges = group, edges
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        kept, *weights_oI = ctx.saved_tensors
        need_weights, need_biases = _split_in_half(ctx.needs_input_grad[3:])
        wait_x = wait_dx = None
        if any(need_weights):
            edges = ctx.edges
            wait_x = (lambda: kept) if edges.keep_entered else edges.start_enter(kept, ctx.group)
        dys_No = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
        if ctx.needs_input_grad[0]:
            dx_NI = dys_No[0] @ weights_oI[0].to(kept.dtype)  # [N, o] @ [o, I]
            for dy_No, weight_oI in zip(dys_No[1:], weights_oI[1:], strict=True):
                dx_NI.addmm_(dy_No, weight_oI.to(kept.dtype))
            dx = dx_NI.view(*dys[0].shape[:-1], dx_NI.shape[-1])
            wait_dx = ctx.edges.start_enter_backward(dx, ctx.group)
            del dx, dx_NI  # `wait_dx` holds the tensor as long as necessary
        dweights: list[Tensor | None] = [None] * len(weights_oI)
        if wait_x is not None:
            x_NI = wait_x().reshape(-1, kept.shape[-1])
            wait_x = None
            dweights = [
                (dy_No.t() @ x_NI).to(weight_oI.dtype) if wanted else None  # [o, N] @ [N, I]
                for dy_No, weight_oI, wanted in zip(dys_No, weights_oI, need_weights, strict=True)
            ]
            del x_NI
        dbiases = [
            dy_No.sum(0).to(weight_oI.dtype) if wanted else None
            for dy_No, weight_oI, wanted in zip(dys_No, weights_oI, need_biases, strict=True)
        ]
        return wait_dx and wait_dx(), None, None, *dweights, *dbiases


def _split_in_half(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return values[: len(values) // 2], values[len(values) // 2 :]


# Key-value heads that several ranks hold: their gradients are summed over these ranks.
#
# Llama 3 has eight key-value heads, Qwen3's mixture-of-experts models four, so of sixteen ranks two
# or four hold each head: the one that their query heads use. All copies start equal, and each has
# the gradient of its own rank's queries. Updates with the summed gradient keep them equal.
#
# The sum is one all-reduce of all heads, in which each rank fills its own head and leaves zeros for
# the others; no group besides the tensor group is needed. It sends K*D*H numbers for each of the
# two matrices in each backward: as much as an activation of K*D tokens.


def get_weights(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a sharded `layer`, as forward uses them."""
    pair = layer.weight, layer.bias
    parts, ranks = getattr(layer, "parts", None), check_group(layer.group)[1]
    if parts is None or parts == ranks:
        return pair
    group, sum_copies = layer.group, _SumCopiedGradients.apply
    return tuple(x if x is None else sum_copies(x, group, parts) for x in pair)


class _SumCopiedGradients(Operator):
    signature = "V -> V"  # see tensor_types

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, parts: int) -> Tensor:
        ctx.group, ctx.parts = group, parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        rank, ranks = check_group(ctx.group)
        total = dx.new_zeros((ctx.parts, *dx.shape))
        own = total[rank * ctx.parts // ranks]
        own.copy_(dx)
        dist.all_reduce(total, group=ctx.group)  # [parts, dx's shape]
        return own.clone(), None, None  # a view would keep all of it
