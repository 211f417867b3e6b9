"""The first layers of a region as one autograd node, to overlap its backward's communication.

Queries, keys and values share their input x, and so do up and gate. Backward computes the gradient
of x, which is summed over all ranks and for which earlier layers wait, and those of the weights,
for which nothing waits. So the gradient of x is computed and sent first, and the others meanwhile.
Megatron-LM does the same for one matrix.

The result is that of `enter` and the single layers, for any operators at the region's edges. Shapes
in names: N tokens (batch times sequence), I inputs, o this rank's share of the outputs.
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
Finish = Callable[[], Tensor]


@dataclass(frozen=True)
class Edges:
    """The two operators at the edges of a region, through which activations enter and leave.

    `enter` precedes an attention, a feed-forward network or the head; `leave` follows the last
    product of a region, and the embedding. `leave` may overwrite the tensor that it is given.

    begin, back: start the communication of `enter` in forward and in backward, and return a
    function that waits and returns the result; `back` may overwrite its input. With them `columns`
    computes while it sends; None: `enter` and the layers run one after the other. keep: save the
    entered tensor for backward; otherwise save its input, which enters again in backward. uncut:
    type of uncut parameters over the ranks (`tensor_types`).
    """

    enter: Edge
    leave: Edge
    begin: Callable[[Tensor, Group], Finish] | None = None
    back: Callable[[Tensor, Group], Finish] | None = None
    keep: bool = True
    uncut: str = "I"


def handed_on(x: Tensor, _: Group) -> Finish:
    """Return `x`: the `begin` for activations that all ranks have, which sends nothing."""
    return lambda: x


def added_up(dx: Tensor, group: Group) -> Finish:
    """Start to all-reduce `dx` in place: the `back` for activations that all ranks have."""
    if group.size() == 1:
        return lambda: dx
    work = dist.all_reduce(dx, group=group, async_op=True)  # of dx's shape

    def finish() -> Tensor:
        work.wait()
        return dx

    return finish


class Entrance:
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
            layer.entrance = self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy of the model, which has layers of its own."""
        layers = [reference() for reference in self.layers]
        return {"layers": layers, "group": self.group, "edges": self.edges}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy; outputs kept between two layers' calls are not copied."""
        self.layers = [weakref.ref(layer) for layer in state["layers"]]
        self.group, self.edges, self.x, self.outputs = state["group"], state["edges"], None, {}

    def output(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the output [..., o] of `layer` for x [..., I]."""
        if x is not self.x or layer not in self.outputs:
            layers = [reference() for reference in self.layers]
            self.x, self.outputs = x, dict(zip(layers, self._compute(x, layers), strict=True))
        y = self.outputs.pop(layer)
        if not self.outputs:
            self.x = None  # release x
        return y

    def _compute(self, x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
        weights, biases = zip(*map(used, layers), strict=True)
        if self.edges.begin is not None:
            return columns(x, weights, biases, self.group, self.edges)
        entered = self.edges.enter(x, self.group)
        return [F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True)]


def columns(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    edges: Edges,
) -> tuple[Tensor, ...]:
    """Return edges.enter(x) @ weight.T + bias, [..., o], for x [..., I] and each weight [o, I]."""
    return _Columns.apply(x, group, edges, *weights, *biases)


class _Columns(Operator):
    @staticmethod
    def plainly(x: Tensor, group: Group, edges: Edges, *parameters: Tensor | None) -> Any:
        """Compute the same with operators that `tensor_types` knows, one after the other."""
        entered = edges.enter(x, group)
        return tuple(F.linear(entered, w, b) for w, b in zip(*_halves(parameters), strict=True))

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, edges: Edges, *parameters: Tensor | None) -> Any:
        weights, biases = _halves(parameters)
        entered = edges.begin(x, group)()
        ys = tuple(F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True))
        kept = entered if edges.keep else x
        ctx.save_for_backward(kept.to(ys[0].dtype), *weights)  # autocast's dtype, if any
        ctx.group, ctx.edges = group, edges
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        kept, *weights_oI = ctx.saved_tensors
        of_weights, of_biases = _halves(ctx.needs_input_grad[3:])
        come = arrive = None
        if any(of_weights):
            come = (lambda: kept) if ctx.edges.keep else ctx.edges.begin(kept, ctx.group)
        dys_No = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
        if ctx.needs_input_grad[0]:
            dx_NI = dys_No[0] @ weights_oI[0].to(kept.dtype)  # [N, o] @ [o, I]
            for dy_No, weight_oI in zip(dys_No[1:], weights_oI[1:], strict=True):
                dx_NI.addmm_(dy_No, weight_oI.to(kept.dtype))
            arrive = ctx.edges.back(dx_NI.view(*dys[0].shape[:-1], dx_NI.shape[-1]), ctx.group)
            del dx_NI  # `arrive` holds the tensor as long as necessary
        dweights: list[Tensor | None] = [None] * len(weights_oI)
        if come is not None:
            x_NI = come().reshape(-1, kept.shape[-1])
            come = None
            dweights = [
                (dy_No.t() @ x_NI).to(weight_oI.dtype) if wanted else None  # [o, N] @ [N, I]
                for dy_No, weight_oI, wanted in zip(dys_No, weights_oI, of_weights, strict=True)
            ]
            del x_NI
        dbiases = [
            dy_No.sum(0).to(weight_oI.dtype) if wanted else None
            for dy_No, weight_oI, wanted in zip(dys_No, weights_oI, of_biases, strict=True)
        ]
        return arrive and arrive(), None, None, *dweights, *dbiases


def _halves(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split a list into the weights' and the biases' halves."""
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


def used(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a cut `layer`, as forward uses them."""
    pair = layer.weight, layer.bias
    parts, ranks = getattr(layer, "parts", None), check_group(layer.group)[1]
    if parts is None or parts == ranks:
        return pair
    weight, bias = (x if x is None else _Copied.apply(x, layer.group, parts) for x in pair)
    return weight, bias


class _Copied(Operator):
    words = "V -> V"  # see tensor_types

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
