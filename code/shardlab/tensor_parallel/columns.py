"""The layers that a region begins with, as one operator: what backward sends hides behind products.

Queries, keys and values see the same x, and so do up and gate. Backward owes two things: the
gradient of x, which is a sum over all ranks and for which the layers before wait, and the gradients
of the weights, for which nobody waits. So x's is computed first and sent, and while it is under way
the others are computed. Megatron-LM does the same for one matrix.

It computes what `copy_to` and the layers one by one do. Shapes in names: N tokens (batch times
sequence), I inputs, o this rank's share of a layer's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .operators import Edges, Group, copy_to, ranks_in, reduce_from_


def columns(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: Group
) -> tuple[Tensor, ...]:
    """copy_to(x) [..., I] @ weight.T + bias, [..., o], for each weight [o, I] and bias [o]."""
    return _Columns.apply(x, group, *weights, *biases)


REPLICATED = Edges(copy_to, reduce_from_, columns)  # outside, all ranks have all activations


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, *parameters: Tensor | None) -> Any:
        weights, biases = _halves(parameters)
        ys = tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
        ctx.group = group
        ctx.save_for_backward(x.to(ys[0].dtype), *weights)  # under autocast, what was multiplied
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x, *weights_oI = ctx.saved_tensors
        x_NI = x.reshape(-1, x.shape[-1])
        dys_No = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
        of_weights, of_biases = _halves(ctx.needs_input_grad[2:])
        dx_NI = work = None
        if ctx.needs_input_grad[0]:
            dx_NI = dys_No[0] @ weights_oI[0].to(x.dtype)  # [N, o] @ [o, I]
            for dy_No, weight_oI in zip(dys_No[1:], weights_oI[1:], strict=True):
                dx_NI.addmm_(dy_No, weight_oI.to(x.dtype))
            if ranks_in(ctx.group) > 1:
                work = dist.all_reduce(dx_NI, group=ctx.group, async_op=True)  # [N, I]
        dweights = [
            (dy_No.t() @ x_NI).to(weight_oI.dtype) if wanted else None  # [o, N] @ [N, I]
            for dy_No, weight_oI, wanted in zip(dys_No, weights_oI, of_weights, strict=True)
        ]
        dbiases = [
            dy_No.sum(0).to(weight_oI.dtype) if wanted else None
            for dy_No, weight_oI, wanted in zip(dys_No, weights_oI, of_biases, strict=True)
        ]
        if work is not None:
            work.wait()
        return None if dx_NI is None else dx_NI.view(x.shape), None, *dweights, *dbiases


def _halves(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Those of the weights, and those of the biases."""
    return values[: len(values) // 2], values[len(values) // 2 :]
