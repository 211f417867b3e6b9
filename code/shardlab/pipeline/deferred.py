"""Backward in two halves: the input's gradient now, the weights' gradients later.

A linear layer's backward is two products of the same size: dx = dy W, for which the stage before
waits, and dW = dyᵀ x, for which only the optimizer waits. Zero bubble schedules (Qi et al. 2023,
arXiv 2401.10241, section 2) defer the second one to a time when a stage would idle.

`defer_weight_gradients` splits every nn.Linear in a module, from outside. Backward then frees all
that it has used except each linear layer's x and dy, which are kept for `run_tasks`. Gradients of
norms' and embeddings' weights are not deferred: they are cheap and come with the input's gradient.

Shapes in names: N tokens (batch times sequence), I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Task = Callable[[], None]


def run_tasks(tasks: list[Task]) -> None:
    """Run deferred tasks in order, and release each task's tensors once it is done."""
    tasks.reverse()
    while tasks:
        tasks.pop()()


def defer_weight_gradients(module: nn.Module) -> list[Task]:
    """Make backward through `module` defer the weight gradients of its linear layers.

    Returns the list to which backward appends the deferred tasks. A module with an attribute
    `deferred_tasks` gets this list and defers its own work.
    """
    tasks: list[Task] = []
    for part in module.modules():
        if hasattr(part, "deferred_tasks"):
            part.deferred_tasks = tasks
        elif type(part).forward is nn.Linear.forward:
            part.forward = partial(_Linear.apply, tasks, part.weight, part.bias)
    return tasks


class _Linear(torch.autograd.Function):
    """A linear layer whose backward returns dx and defers dW and db."""

    @staticmethod
    def forward(
        ctx: Any, tasks: list[Task], weight: Tensor, bias: Tensor | None, x: Tensor
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        ctx.tasks, ctx.weight, ctx.bias = tasks, weight, bias
        ctx.save_for_backward(x.to(y.dtype))  # under autocast, the dtype that was multiplied
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None, Tensor | None]:
        weight_OI = ctx.weight
        (x,) = ctx.saved_tensors
        dy_NO = dy.reshape(-1, dy.shape[-1])
        x_NI = x.reshape(-1, x.shape[-1])
        ctx.tasks.append(partial(_compute_weight_gradients, weight_OI, ctx.bias, x_NI, dy_NO))
        if not ctx.needs_input_grad[3]:
            return None, None, None, None
        dx_NI = dy_NO @ weight_OI.to(dy.dtype)  # [N, O] @ [O, I]
        return None, None, None, dx_NI.view(x.shape)


@torch.no_grad()
def _compute_weight_gradients(
    weight_OI: Tensor, bias_O: Tensor | None, x_NI: Tensor, dy_NO: Tensor
) -> None:
    if weight_OI.requires_grad:
        _add_gradient(weight_OI, dy_NO.t() @ x_NI)  # [O, N] @ [N, I]
    if bias_O is not None and bias_O.requires_grad:
        _add_gradient(bias_O, dy_NO.sum(0))


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient
