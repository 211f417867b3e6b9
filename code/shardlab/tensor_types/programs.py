"""Random programs of communicating and local operations, to test that accepted ones are right.

A program is a list of steps, each of which changes one tensor of four numbers. Its loss is a sum
over the ranks. Finite differences give the gradient of each parameter; the checker decides without
numbers whether backward computes it.

    I, R, V, P  a parameter of this word     f, g         I -> R, P -> I
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

from .adjoint import drawn
from .core import checking, combined, moved
from .declared import declare
from .messages import Mismatch

Operator = Callable[[Tensor, dist.ProcessGroup], Tensor]
Program = tuple[str, ...]
SENT = {"f": "IR", "g": "PI", "gather": "VI", "split": "IV", "enter": "VR", "leave": "PV"}
PARAMETERS = {"I": "I", "R": "R", "V": "V", "P": "P", "x": "I"}
STEPS = (*SENT, "addend", "gelu", *(f"{way}{w}" for way in "*+" for w in "IRVP"))
_SIZE = 4


def draw(number: int, seed: int = 0, care: float = 0.9, shortest: int = 5) -> list[Program]:
    """Draw `number` different programs of one to `shortest` steps or a few more.

    Of programs drawn without care, one in seventy passes. care: the probability of redrawing a step
    that does not fit, and of going on if the program would end without a sum to make. With 0.9
    every second program passes.
    """
    chance, found = random.Random(seed), dict[Program, None]()
    while len(found) < number:
        program, word, length = [], "I", chance.randint(1, shortest)
        while len(program) < length or word in "IR" and chance.random() < care:
            step = chance.choice(STEPS)
            while _after(word, step) is None and chance.random() < care:
                step = chance.choice(STEPS)
            program.append(step)
            word = _after(word, step) or word
        found[tuple(program)] = None
    return list(found)


def _after(word: str, step: str) -> str | None:
    """Return the word that a step makes of `word`; None if the step does not fit."""
    try:
        if step in SENT:
            return moved(word, *SENT[step])
        if step in ("addend", "gelu"):
            return moved(word, "V", "P") if step == "addend" else combined([word], [False], "other")
        how = "product" if step[0] == "*" else "sum"
        return combined([word, step[1]], [False, False], how)
    except Mismatch:
        return None


def parameters(seed: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return this rank's parameters by name, four numbers each; equal on all ranks for I and R."""
    return {
        name: drawn(word, (_SIZE,), group, 17 * seed + i).requires_grad_()
        for i, (name, word) in enumerate(PARAMETERS.items())
    }


def run(
    program: Program,
    given: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    operators: Mapping[str, Operator],
    addend: Callable[[Tensor], Tensor] = lambda y: y,
) -> Tensor:
    """Run the program on `given`, and return four numbers, summed over the ranks.

    operators: by the names in `SENT`; all work along the only dimension. addend: declares its
    tensor a summand.
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


def refusal(program: Program, group: dist.ProcessGroup, operators: Mapping[str, Operator]) -> str:
    """Return the checker's error for the program; "" if it passes."""
    given = parameters(0, group)
    for name, word in PARAMETERS.items():
        declare(given[name], group=word)
    try:
        with checking(group=group):
            run(program, given, group, operators, lambda y: declare(y, group="P"))
    except Mismatch as error:
        return str(error)
    return ""


def wrong_gradients(
    program: Program,
    seed: int,
    group: dist.ProcessGroup,
    operators: Mapping[str, Operator],
) -> list[str]:
    """Return the parameters whose gradient contradicts finite differences. Every rank calls this.

    For I each rank must have the whole gradient. R's gradients must add up to it over the ranks;
    V's and P's gradients belong to each rank's own numbers.
    """
    given = parameters(seed, group)
    weights = torch.arange(1.0, _SIZE + 1, dtype=torch.float64, device=ranks.device())

    def loss() -> Tensor:
        return (run(program, given, group, operators) * weights).sum()

    loss().backward()
    found = []
    for i, (name, word) in enumerate(PARAMETERS.items()):
        parameter = given[name]
        way = drawn(word, (_SIZE,), group, seed + i)
        gradient = torch.zeros_like(way) if parameter.grad is None else parameter.grad
        claim = (gradient * way).sum()
        if word != "I":
            dist.all_reduce(claim, group=group)
        with torch.no_grad():
            width = 1e-6
            parameter += width * way
            above = loss()
            parameter -= 2 * width * way
            below = loss()
            parameter += width * way
        truth = (above - below) / (2 * width)
        # Central differences in float64: 1e-9 of the loss, with third derivatives of a few tens.
        off = ((claim - truth).abs() > 1e-4 * (1 + truth.abs())).double()
        dist.all_reduce(off, group=group)
        if off > 0:
            found.append(name)
    return found
