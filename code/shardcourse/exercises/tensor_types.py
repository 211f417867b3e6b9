"""Exercises of the lesson `tensor_types`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardcourse.exercises import Wrong, exercise
from shardcourse.exercises.forms import blanks, cases, differentiate, run_answer
from shardlab import ranks
from shardlab import tensor_types as tt
from shardlab.tensor_types.adjoint import find_contradictions

_MODEL = {"norm": "RR", "norm's gradient": "PP", "up": "RV", "up's gradient": "PV", "tokens": "VR"}


blanks(
    "type_words",
    _MODEL,
    says="Right: on each axis a gradient has the dual type of its tensor.",
    otherwise="The first type is on dp, the second on tp. Do all ranks of the axis hold the same? "
    "Does each use it with something of its own? What does each rank find for it in backward?",
    wrong={
        ("norm", "RI"): "Where the stream is whole, tp is I; here a rank's norm sees its own "
        "tokens alone.",
        ("norm's gradient", "PI"): "The norm is R on tp: each rank finds a summand for it.",
        ("up's gradient", "VV"): "The weights are R on dp: each rank finds a summand for them.",
    },
)

_ADDENDS = (
    "Its signature is V -> I. Forward is right. Your backward takes what it is given for the whole "
    "gradient, as all ranks have it of I: but the gradient of R is P, and addends have to be added "
    "up."
)


def _operator(answer: Callable[..., Any]) -> Any:
    """Return what contradicts V -> R on a rank, and whether V -> I holds instead."""
    group = dist.group.WORLD
    x = torch.ones(2, 3, dtype=torch.float64, device=ranks.device(), requires_grad=True)
    y = answer(x, group)
    if not isinstance(y, Tensor) or not y.requires_grad:
        return (
            "Its result gets no gradient: collectives know nothing of autograd. Write a "
            "torch.autograd.Function with a backward.",
            None,
        )
    found = find_contradictions(answer, "V -> R", group)
    return found, bool(found) and not find_contradictions(answer, "V -> I", group)


@exercise("my_operator")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        found, others = run_answer(_operator, size, answer)[0]
        if others is None:
            raise Wrong(found)
        if others:
            raise Wrong(_ADDENDS)
        if found:
            raise Wrong(f"On {size} ranks V -> R does not hold: {'; '.join(found)}.")
    return "Right on 2 and 4 ranks: ⟨y, dy⟩ = ⟨x, dx⟩, and the value stays."


def _summed(types: list[str]) -> str | None:
    try:
        return tt.combine_types(types, [False] * len(types), "sum")
    except tt.TypeMismatch:
        return None


cases(
    "my_sum",
    [(list(types),) for n in (1, 2, 3) for types in product(tt.TYPES, repeat=n)],
    _summed,
    says="Right for all 84 lists of up to three types.",
)


_WIDE, _INNER = 6, 8


def _network() -> dict[str, Tensor]:
    """Return the unsharded tensors in float64, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (3, _WIDE), "gate": (_INNER, _WIDE), "up": (_INNER, _WIDE)}
    shapes |= {"down": (_WIDE, _INNER), "scale": (1,), "bias": (_WIDE,), "dy": (3, _WIDE)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(ranks.device())
        for name, shape in shapes.items()
    }


_CUT = {"gate": 0, "up": 0, "down": 1}


def _parts(group: dist.ProcessGroup) -> dict[str, Tensor]:
    made = _network()
    for name, x in made.items():
        if name in _CUT:
            x = x.chunk(group.size(), _CUT[name])[group.rank()].clone()
        made[name] = x.requires_grad_(name != "dy")
    return made


def _trained(answer: Callable[..., Any]) -> Any:
    """Return the answer's result on a rank, and the gradients by name."""
    made = _parts(dist.group.WORLD)
    dy = made.pop("dy")
    y, *gradients = differentiate(answer, list(made.values()), dy)
    if not isinstance(y, Tensor) or y.shape != dy.shape or not y.requires_grad:
        raise Wrong("It returned no result of x's shape that can be differentiated.")
    return y.detach(), dict(zip(made, gradients, strict=True))


@exercise("my_network")
def _(answer: Callable[..., Any]) -> str:
    full = {name: x.cpu().requires_grad_(name != "dy") for name, x in _network().items()}
    y = F.silu(F.linear(full["x"], full["gate"])) * F.linear(full["x"], full["up"])
    y = F.linear(y * full["scale"], full["down"]) + full["bias"]
    y.backward(full["dy"])

    def step(tp: dist.ProcessGroup) -> None:
        made = _parts(tp)
        made.pop("dy")
        for name, x in made.items():
            x.tensor_name = name
            tt.declare_types(x, tp="V" if name in _CUT else "I")
        answer(*made.values(), tp).sum().backward()

    size = 2
    found = run_answer(_trained, size, answer)
    try:
        verdict = tt.check_step(step, tp=size)
    except ranks.RankError as error:
        raise Wrong(f"Under the checker, {error}") from None
    for rank, (mine, gradients) in enumerate(found):
        if not torch.allclose(mine, y.detach()):
            gap = (mine - y.detach()).abs().max().item()
            raise Wrong(f"The output of rank {rank} is off by {gap:.3g}.")
        for name, gradient in gradients.items():
            want = full[name].grad
            want = want.chunk(size, _CUT[name])[rank] if name in _CUT else want
            if gradient is None or not torch.allclose(gradient, want):
                said = "" if verdict else f" The checker:\n{verdict.message}"
                raise Wrong(f"On rank {rank} the gradient of {name} is not one process's.{said}")
    if not verdict:
        raise Wrong(f"All is right in numbers, and the checker refuses it:\n{verdict.message}")
    return "Right: equal to one process on two ranks, gradients too, and the checker agrees."


_WAYS = ("types", "loss", "gradients", None)
_PLAN = {
    "copy_to forgotten": ("types", "x is I and is multiplied by a matrix that is V."),
    "loss divided by N twice, before backward": (
        "loss",
        "A factor has no type; it is in the loss.",
    ),
    "a rank's tokens begin at position 0": (
        "loss",
        "Positions are numbers: which output has them?",
    ),
    "gradients of norms not summed, sequence cut": ("types", "P comes to the step of what is R."),
    "each epoch in the same order": (None, "Each single step is right."),
    "gradients averaged over tp in place of dp": ("types", "On tp a gradient is I or V, and no P."),
}
blanks(
    "type_plan",
    {name: right for name, (right, _) in _PLAN.items()},
    says="Right: types first, then one step beside one process; time is a third matter.",
    otherwise="Allowed are 'types', 'loss', 'gradients' and None, for each mistake.",
    wrong={
        (name, given): "It finds it, and something cheaper does as well."
        if given == "gradients" and right
        else why
        for name, (right, why) in _PLAN.items()
        for given in _WAYS
    },
)
