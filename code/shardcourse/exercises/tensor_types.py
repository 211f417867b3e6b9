"""Exercises of the lesson `tensor_types`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import (
    add_blanks,
    add_cases,
    compute_gradients,
    create_group,
    run_answer,
)
from shardlab import ranks
from shardlab import tensor_types as tt
from shardlab.tensor_types.adjoint import find_contradictions

_TYPES = {"norm": "RR", "norm's gradient": "PP", "up": "RV", "up's gradient": "PV", "tokens": "VR"}


add_blanks(
    "type_words",
    _TYPES,
    success="Right: on each axis a gradient has the dual type of its tensor.",
    default_hint="The first type is on dp, the second on tp. Do all ranks of an axis hold the same "
    "value? Does each combine it with data of its own? Which gradient does each rank compute?",
    hints={
        ("norm", "RI"): "Where the stream is whole, tp is I; here a rank's norm sees its own "
        "tokens alone.",
        ("norm's gradient", "PI"): "The norm is R on tp: each rank finds a summand for it.",
        ("up's gradient", "VV"): "The weights are R on dp: each rank finds a summand for them.",
    },
)

_ADDENDS_HINT = (
    "Its signature is V -> I. Forward is right. Your backward treats its argument as the whole "
    "gradient, which is true for I. But the gradient of R is P: the ranks' addends have to be "
    "added up."
)


def _check_operator(answer: Callable[..., Any]) -> Any:
    """Return the contradictions of V -> R on a rank, and whether V -> I holds instead."""
    x = torch.ones(2, 3, dtype=torch.float64, device=ranks.device(), requires_grad=True)
    with create_group() as group:
        y = answer(x, group)
        if isinstance(y, Tensor) and y.requires_grad:
            y.sum().backward()
    if not isinstance(y, Tensor) or not y.requires_grad:
        return (
            "Its result gets no gradient: collectives are invisible to autograd. Write a "
            "torch.autograd.Function with a backward.",
            None,
        )
    found = find_contradictions(answer, "V -> R", group)
    return found, bool(found) and not find_contradictions(answer, "V -> I", group)


@add_exercise("my_operator")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        found, others = run_answer(_check_operator, size, answer)[0]
        if others is None:
            raise WrongAnswer(found)
        if others:
            raise WrongAnswer(_ADDENDS_HINT)
        if found:
            raise WrongAnswer(f"On {size} ranks V -> R does not hold: {'; '.join(found)}.")
    return "Right on 2 and 4 ranks: ⟨y, dy⟩ = ⟨x, dx⟩."


def _sum_types(types: list[str]) -> str | None:
    try:
        return tt.combine_types(types, [False] * len(types), "sum")
    except tt.TypeMismatch:
        return None


add_cases(
    "my_sum",
    [(list(types),) for n in (1, 2, 3) for types in product(tt.TYPES, repeat=n)],
    _sum_types,
    success="Right for all 84 lists of up to three types.",
)


_HIDDEN, _INNER = 6, 8


def _make_tensors() -> dict[str, Tensor]:
    """Return the unsharded tensors in float64, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (3, _HIDDEN), "gate": (_INNER, _HIDDEN), "up": (_INNER, _HIDDEN)}
    shapes |= {"down": (_HIDDEN, _INNER), "scale": (1,), "bias": (_HIDDEN,), "dy": (3, _HIDDEN)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(ranks.device())
        for name, shape in shapes.items()
    }


_SHARD_DIMS = {"gate": 0, "up": 0, "down": 1}


def _make_shards(group: dist.ProcessGroup) -> dict[str, Tensor]:
    made = _make_tensors()
    for name, x in made.items():
        if name in _SHARD_DIMS:
            x = x.chunk(group.size(), _SHARD_DIMS[name])[group.rank()].clone()
        made[name] = x.requires_grad_(name != "dy")
    return made


def _run_network(answer: Callable[..., Any]) -> Any:
    with create_group() as group:
        made = _make_shards(group)
        dy = made.pop("dy")
        y, *gradients = compute_gradients(answer, list(made.values()), dy, group)
    if not isinstance(y, Tensor) or y.shape != dy.shape or not y.requires_grad:
        raise WrongAnswer("The result should be a tensor of x's shape that requires a gradient.")
    return y.detach(), dict(zip(made, gradients, strict=True))


@add_exercise("my_network")
def _(answer: Callable[..., Any]) -> str:
    full = {name: x.cpu().requires_grad_(name != "dy") for name, x in _make_tensors().items()}
    y = F.silu(F.linear(full["x"], full["gate"])) * F.linear(full["x"], full["up"])
    y = F.linear(y * full["scale"], full["down"]) + full["bias"]
    y.backward(full["dy"])

    def step(tp: dist.ProcessGroup) -> None:
        made = _make_shards(tp)
        made.pop("dy")
        for name, x in made.items():
            x.tensor_name = name
            tt.declare_types(x, tp="V" if name in _SHARD_DIMS else "I")
        answer(*made.values(), tp).sum().backward()

    size = 2
    found = run_answer(_run_network, size, answer)
    try:
        verdict = tt.check_step(step, tp=size)
    except ranks.RankError as error:
        raise WrongAnswer(f"Under the checker, {error}") from None
    for rank, (mine, gradients) in enumerate(found):
        if not torch.allclose(mine, y.detach()):
            gap = (mine - y.detach()).abs().max().item()
            raise WrongAnswer(f"The output of rank {rank} is off by {gap:.3g}.")
        for name, gradient in gradients.items():
            want = full[name].grad
            want = want.chunk(size, _SHARD_DIMS[name])[rank] if name in _SHARD_DIMS else want
            if gradient is None or not torch.allclose(gradient, want):
                said = "" if verdict else f" The checker:\n{verdict.message}"
                words = f"the gradient of {name} differs from one process's"
                raise WrongAnswer(f"On rank {rank} {words}.{said}")
    if not verdict:
        raise WrongAnswer(f"The numbers are right, but the checker finds:\n{verdict.message}")
    return "Right: output and gradients equal one process's on two ranks, and the checker agrees."


_CHECKS = ("types", "loss", "gradients", None)
_PLAN = {
    "copy_to forgotten": ("types", "x is I and is multiplied by a matrix that is V."),
    "loss divided by N twice, before backward": (
        "loss",
        "A factor has no type, but it changes the loss.",
    ),
    "a rank's tokens begin at position 0": ("loss", "Which output depends on positions?"),
    "gradients of norms not summed, sequence cut": ("types", "An R parameter gets a P gradient."),
    "each epoch in the same order": (None, "Each single step is right."),
    "gradients averaged over tp in place of dp": ("types", "On tp a gradient is I or V, never P."),
}
add_blanks(
    "type_plan",
    {name: right for name, (right, _) in _PLAN.items()},
    success="Right: types first, then one step beside one process; one mistake shows in no step.",
    default_hint="Allowed are 'types', 'loss', 'gradients' and None, for each mistake.",
    hints={
        (name, given): "It finds the mistake, but something cheaper finds it, too."
        if given == "gradients" and right
        else why
        for name, (right, why) in _PLAN.items()
        for given in _CHECKS
    },
)
