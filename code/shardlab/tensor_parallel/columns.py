"""The layers that a region begins with, as one operator: what backward sends hides behind products.

Queries, keys and values see the same x, and so do up and gate. Backward owes two things: the
gradient of x, which is a sum over all ranks and for which the layers before wait, and the gradients
of the weights, for which nobody waits. So x's is computed first and sent, and while it is under way
the others are computed. Megatron-LM does the same for one matrix.

It computes what `enter` and the layers one by one do, whatever stands at the edges of the region.
Shapes in names: N tokens (batch times sequence), I inputs, o this rank's share of the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .operators import Edges, Finish, Group, copy_to, ranks_in, reduce_from_


def _handed_on(x: Tensor, _: Group) -> Finish:
    return lambda: x


def _added_up(dx: Tensor, group: Group) -> Finish:
    if ranks_in(group) == 1:
        return lambda: dx
    work = dist.all_reduce(dx, group=group, async_op=True)  # of dx's shape

    def finish() -> Tensor:
        work.wait()
        return dx

    return finish


# Outside, all ranks have all activations.
REPLICATED = Edges(copy_to, reduce_from_, _handed_on, _added_up)


def columns(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    edges: Edges = REPLICATED,
) -> tuple[Tensor, ...]:
    """edges.enter(x) [..., I] @ weight.T + bias, [..., o], for each weight [o, I] and bias [o]."""
    return _Columns.apply(x, group, edges, *weights, *biases)


class _Columns(torch.autograd.Function):
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
            arrive = ctx.edges.back(dx_NI.view(*dys[0].shape[:-1], -1), ctx.group)
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
