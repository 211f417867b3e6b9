"""Random programs of communicating and local operations, to test that accepted ones are right.

A program is a list of steps, each of which changes one tensor of four numbers. Its loss is a sum
over the ranks. Finite differences give the gradient of each parameter; the checker decides without
numbers whether backward computes it.

    I, R, V, P  a parameter of this type     f, g         I -> R, P -> I
    gather      V -> I, halves added         split        I -> V, one half twice
    enter       V -> R, halves added         leave        P -> V, one half twice
    addend      V is declared P              gelu         of each number
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardlab import ranks

from .adjoint import draw_tensor
from .core import check_types, combine_types, convert_type
from .declarations import declare_types
from .messages import TypeMismatch

Group = dist.ProcessGroup
Operator = Callable[[Tensor, Group], Tensor]
Program = tuple[str, ...]
OPERATOR_TYPES = {"f": "IR", "g": "PI", "gather": "VI", "split": "IV", "enter": "VR", "leave": "PV"}
PARAMETER_TYPES = {"I": "I", "R": "R", "V": "V", "P": "P", "x": "I"}
STEPS = (*OPERATOR_TYPES, "addend", "gelu", *(f"{op}{t}" for op in "*+" for t in "IRVP"))
_SIZE = 4


def draw_programs(number: int, seed: int = 0, redraw: float = 0.9) -> list[Program]:
    """Draw `number` different programs of one to five steps, or a few more.

    redraw: the probability of redrawing a step that is refused, and of adding a step if the program
    would end without a sum to make. With 0.9 every second program passes, with 0 one in seventy.
    """
    rng, found = random.Random(seed), dict[Program, None]()
    while len(found) < number:
        program, type_, length = [], "I", rng.randint(1, 5)
        while len(program) < length or type_ in "IR" and rng.random() < redraw:
            step = rng.choice(STEPS)
            while _type_after(type_, step) is None and rng.random() < redraw:
                step = rng.choice(STEPS)
            program.append(step)
            type_ = _type_after(type_, step) or type_
        found[tuple(program)] = None
    return list(found)


def _type_after(type_: str, step: str) -> str | None:
    """Return the result's type; None if the step does not accept `type_`."""
    try:
        if step in OPERATOR_TYPES:
            return convert_type(type_, *OPERATOR_TYPES[step])
        if step == "addend":
            return convert_type(type_, "V", "P")
        if step == "gelu":
            return combine_types([type_], [False], "other")
        kind = "product" if step[0] == "*" else "sum"
        return combine_types([type_, step[1]], [False, False], kind)
    except TypeMismatch:
        return None


def make_parameters(seed: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return this rank's parameters by name, four numbers each; equal on all ranks for I and R."""
    return {
        name: draw_tensor(type_, (_SIZE,), group, 17 * seed + i).requires_grad_()
        for i, (name, type_) in enumerate(PARAMETER_TYPES.items())
    }


def run_program(
    program: Program,
    given: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    operators: Mapping[str, Operator],
    addend: Callable[[Tensor], Tensor] = lambda y: y,
) -> Tensor:
    """Run the program on `given`, and return four numbers, summed over the ranks.

    operators: by the names in `OPERATOR_TYPES`; all work along the only dimension. addend: declares
    its tensor a summand.
    """
    y = given["x"] * 1.0
    for step in program:
        if step in ("gather", "enter"):
            y = operators[step](y, group).unflatten(0, (-1, _SIZE)).sum(0)
        elif step in ("split", "leave"):
            y = torch.cat([operators[step](y, group)] * group.size())
        elif step in ("f", "g"):
            y = operators[step](y, group)
        elif step == "addend":
            y = addend(y)
        elif step == "gelu":
            y = F.gelu(y)
        else:
            y = y * given[step[1]] if step[0] == "*" else y + given[step[1]]
    return operators["g"](y, group)


def find_type_error(program: Program, group: Group, operators: Mapping[str, Operator]) -> str:
    """Return the checker's error for the program; "" if it passes."""
    given = make_parameters(0, group)
    for name, type_ in PARAMETER_TYPES.items():
        declare_types(given[name], group=type_)
    try:
        with check_types(group=group):
            run_program(program, given, group, operators, lambda y: declare_types(y, group="P"))
    except TypeMismatch as error:
        return str(error)
    return ""


def find_wrong_gradients(
    program: Program, seed: int, group: Group, operators: Mapping[str, Operator]
) -> list[str]:
    """Return the parameters whose gradient contradicts finite differences. Every rank calls this.

    For I each rank must have the whole gradient. R's gradients must add up to it over the ranks;
    V's and P's gradients belong to each rank's own numbers.
    """
    given = make_parameters(seed, group)
    weights = torch.arange(1.0, _SIZE + 1, dtype=torch.float64, device=ranks.device())

    def compute_loss() -> Tensor:
        return (run_program(program, given, group, operators) * weights).sum()

    compute_loss().backward()
    found = []
    for i, (name, type_) in enumerate(PARAMETER_TYPES.items()):
        parameter = given[name]
        direction = draw_tensor(type_, (_SIZE,), group, seed + i)
        gradient = torch.zeros_like(direction) if parameter.grad is None else parameter.grad
        claim = (gradient * direction).sum()
        if type_ != "I":
            dist.all_reduce(claim, group=group)
        with torch.no_grad():
            width = 1e-6
            parameter += width * direction
            above = compute_loss()
            parameter -= 2 * width * direction
            below = compute_loss()
            parameter += width * direction
        truth = (above - below) / (2 * width)
        # Central differences in float64: 1e-9 of the loss, with third derivatives of a few tens.
        off = ((claim - truth).abs() > 1e-4 * (1 + truth.abs())).double()
        dist.all_reduce(off, group=group)
        if off > 0:
            found.append(name)
    return found
