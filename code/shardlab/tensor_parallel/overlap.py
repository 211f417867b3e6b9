"""The layers that a region begins with, as one: what backward sends hides behind products.

Queries, keys and values see the same x, and so do up and gate. Backward owes two things: the
gradient of x, which is a sum over all ranks and for which the layers before wait, and the gradients
of the weights, for which nobody waits. So x's is computed first and sent, and while it is under way
the others are computed. Megatron-LM does the same for one matrix.

It computes what `enter` and the layers one by one do, whatever stands at the edges of the region.
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
Finish = Callable[[], Tensor]


@dataclass(frozen=True)
class Edges:
    """The two operators around a region: how activations get in, and how they get out.

    `enter` stands in front of an attention, a feed-forward network or the head, `leave` behind the
    product that ends one, and behind the embedding. `leave` may change the tensor that it is given.

    begin, back: start what `enter` does forward and backward, and return a function that waits and
    gives the result; `back` may change what it is given. With them, `columns` sends while it
    computes; None: `enter` and the layers behind it stand one after the other. keep: hold on to
    what has entered until backward; otherwise to what was there before, which enters once more.
    uncut: what a parameter that no rank cuts is over the ranks, in the words of `tensor_types`.
    """

    enter: Edge
    leave: Edge
    begin: Callable[[Tensor, Group], Finish] | None = None
    back: Callable[[Tensor, Group], Finish] | None = None
    keep: bool = True
    uncut: str = "I"


def handed_on(x: Tensor, _: Group) -> Finish:
    """`begin` where all ranks have x: nothing is sent."""
    return lambda: x


def added_up(dx: Tensor, group: Group) -> Finish:
    """`back` where all ranks have x: start to add up the ranks' gradients of it, in place."""
    if group.size() == 1:
        return lambda: dx
    work = dist.all_reduce(dx, group=group, async_op=True)  # of dx's shape

    def finish() -> Tensor:
        work.wait()
        return dx

    return finish


class Entrance:
    """Column-parallel layers that are called with the same x: it enters once, for all of them.

    The first that is called with an x has all outputs computed, and each of the others, called with
    the same x, takes its own. Called with another x, a layer has them computed anew.
    """

    def __init__(self, layers: Sequence[nn.Module], group: Group, edges: Edges):
        """From now on the `layers`, which have a weight and a bias or None, ask this."""
        self.layers = [weakref.ref(layer) for layer in layers]  # they have this, and no circle
        self.group, self.edges = group, edges
        self.x: Tensor | None = None  # what the outputs below are of
        self.outputs: dict[nn.Module, Tensor] = {}  # by layer, those not yet taken
        for layer in layers:
            layer.entrance = self

    def __getstate__(self) -> dict[str, Any]:
        """For a copy of the model, which has layers of its own."""
        layers = [reference() for reference in self.layers]
        return {"layers": layers, "group": self.group, "edges": self.edges}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What is kept between two layers' calls is not copied."""
        self.layers = [weakref.ref(layer) for layer in state["layers"]]
        self.group, self.edges, self.x, self.outputs = state["group"], state["edges"], None, {}

    def output(self, layer: nn.Module, x: Tensor) -> Tensor:
        """That of `layer` for x [..., I]: [..., o]."""
        if x is not self.x or layer not in self.outputs:
            layers = [reference() for reference in self.layers]
            self.x, self.outputs = x, dict(zip(layers, self._compute(x, layers), strict=True))
        y = self.outputs.pop(layer)
        if not self.outputs:
            self.x = None  # which is not to stay alive for this
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
    """edges.enter(x) [..., I] @ weight.T + bias, [..., o], for each weight [o, I] and bias [o]."""
    return _Columns.apply(x, group, edges, *weights, *biases)


class _Columns(Operator):
    @staticmethod
    def plainly(x: Tensor, group: Group, edges: Edges, *parameters: Tensor | None) -> Any:
        """The same, one after the other: `tensor_types` follows this, whose operators it knows."""
        entered = edges.enter(x, group)
        return tuple(F.linear(entered, w, b) for w, b in zip(*_halves(parameters), strict=True))

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, edges: Edges, *parameters: Tensor | None) -> Any:
        weights, biases = _halves(parameters)
        entered = edges.begin(x, group)()
        ys = tuple(F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True))
        kept = entered if edges.keep else x
        ctx.save_for_backward(kept.to(ys[0].dtype), *weights)  # under autocast, what was multiplied
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
            del dx_NI  # `arrive` has it as long as it is needed
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
    """Those of the weights, and those of the biases."""
    return values[: len(values) // 2], values[len(values) // 2 :]


# Heads of keys and values that several ranks have: their gradients are sums over these ranks.
#
# Llama 3 has eight of them, Qwen3's models with experts four. Sixteen ranks have them twice or four
# times, each rank the one that its heads of queries look at. All copies begin alike, and each has a
# gradient that knows of its own rank's queries. What their sum is applied to stays alike.
#
# The sum is one all-reduce of all heads, in which a rank's own stand at their place and the others
# are zeros: no group of ranks is needed beside the tensor group. It is a message of K*D*H numbers
# for each of the two matrices, in each backward: as an activation of K*D tokens.


def used(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a cut `layer`, as forward uses them."""
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
