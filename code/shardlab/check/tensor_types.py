"""The exercises of lesson `tensor_types`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardlab import ranks
from shardlab import tensor_types as tt
from shardlab.tensor_types.adjoint import disproof

from . import Wrong, called, exercise, run_answer

_TIMEOUT = 20.0  # seconds, for what takes milliseconds: who waits that long waits for ever
_MODEL = {"norm": "RR", "norm's gradient": "PP", "up": "RV", "up's gradient": "PV", "tokens": "VR"}


@exercise("type_words")
def _(answer: Any) -> str:
    if not isinstance(answer, dict) or set(answer) != set(_MODEL):
        raise Wrong(f"A word pair for each of {', '.join(map(repr, _MODEL))} is asked for.")
    for name, right in _MODEL.items():
        given = answer[name]
        if not isinstance(given, str) or len(given) != 2 or not set(given) <= set(tt.WORDS):
            raise Wrong(f"{name!r}: {given!r} is no pair of the words I, R, V and P.")
        for axis, mine, wanted in zip(("dp", "tp"), given, right, strict=True):
            if mine != wanted:
                raise Wrong(f"{name!r}: {mine} on {axis} it is not. {_why(name, axis, mine)}")
    return "Right: on each axis a gradient has the dual word of its tensor."


def _why(name: str, axis: str, given: str) -> str:
    if "gradient" in name:
        other = _MODEL[name.split("'")[0]][axis == "tp"]
        return f"The tensor is {other} there: what does each rank find for it?"
    if name == "tokens" and axis == "tp":
        return "All ranks of a tensor group look at the same tokens, and integers get no gradient."
    if name == "norm" and axis == "tp" and given == "I":
        return "That it is where the stream is whole. Here a rank's norm sees its own tokens alone."
    return (
        "Do all ranks of this axis hold the same? And does each use it with something of its own?"
    )


_WRONG_WORDS = {
    "V -> I": "Forward is right. Your backward takes what it is given for the whole gradient, as "
    "all ranks have it of I: but the gradient of R is P, and addends have to be added up.",
    "I -> R": "It changes no value: the ranks' parts are to stand side by side.",
}


def _operator(answer: Callable[..., Any]) -> Any:
    """On a rank: what speaks against V -> R, and which other words pass."""
    group = dist.group.WORLD
    x = torch.ones(2, 3, dtype=torch.float64, device=ranks.device(), requires_grad=True)
    y = answer(x, group)
    if not isinstance(y, Tensor):
        return "none", []
    if not y.requires_grad:
        return "cut", []
    found = disproof(answer, "V -> R", group)
    pairs = [f"{src} -> {dst}" for src, dst in product(tt.WORDS, tt.WORDS)]
    return found, [w for w in pairs if found and not disproof(answer, w, group)]


@exercise("my_operator")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        found, others = run_answer(_operator, size, answer, timeout=_TIMEOUT)[0]
        if found == "none":
            raise Wrong("It returned no tensor.")
        if found == "cut":
            raise Wrong(
                "Its result gets no gradient: collectives know nothing of autograd. Write a "
                "torch.autograd.Function with a backward."
            )
        for words in others:
            if words in _WRONG_WORDS:
                raise Wrong(f"Its words are {words}. {_WRONG_WORDS[words]}")
        if found:
            raise Wrong(f"On {size} ranks V -> R does not hold: {'; '.join(found)}.")
    return "Right on 2 and 4 ranks: ⟨y, dy⟩ = ⟨x, dx⟩, and the value stays."


def _summed(words: list[str]) -> str | None:
    try:
        return tt.combined(words, [False] * len(words), "sum")
    except tt.Mismatch:
        return None


@exercise("my_sum")
def _(answer: Callable[..., Any]) -> str:
    cases = [list(words) for n in (1, 2, 3) for words in product(tt.WORDS, repeat=n)]
    for words in cases:
        given, right = called(answer, list(words)), _summed(words)
        if given == right:
            continue
        told = f"For {words} it returned {given!r}. "
        if given is not None and given not in tt.WORDS:
            raise Wrong(told + "A word is asked for, or None.")
        if "I" in words and set(words) != {"I"}:
            told += "The other would give I's gradient something of the rank's own."
        elif set(words) == {"P"}:
            told += "Addends of two sums, added, are addends of the sum of both."
        elif "P" in words:
            told += "What is added to each addend is added once by each rank."
        elif set(words) == {"R", "V"}:
            told += "R may be used with something of a rank's own; the result is the rank's own."
        else:
            told += "Like goes with like."
        raise Wrong(told)
    return f"Right for all {len(cases)} lists of up to three words."


_WIDE, _INNER = 6, 8


def _network() -> dict[str, Tensor]:
    """Whole tensors, the same for everyone who asks, in float64."""
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
    """On a rank: its result, and the gradients by name."""
    made = _parts(dist.group.WORLD)
    dy = made.pop("dy")
    y = answer(*made.values(), dist.group.WORLD)
    if not isinstance(y, Tensor) or y.shape != dy.shape or not y.requires_grad:
        return None
    y.backward(dy)
    return y.detach(), {name: x.grad for name, x in made.items()}


@exercise("my_network")
def _(answer: Callable[..., Any]) -> str:
    whole = {name: x.cpu().requires_grad_(name != "dy") for name, x in _network().items()}
    y = F.silu(F.linear(whole["x"], whole["gate"])) * F.linear(whole["x"], whole["up"])
    y = F.linear(y * whole["scale"], whole["down"]) + whole["bias"]
    y.backward(whole["dy"])

    def network(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *rest: Any) -> Any:
        return answer(x, gate, up, down, *rest)

    def step(tp: dist.ProcessGroup) -> None:
        made = _parts(tp)
        made.pop("dy")
        for name, x in made.items():
            x.called = name
            tt.declare(x, tp="V" if name in _CUT else "I")
        network(*made.values(), tp).sum().backward()

    size = 2
    found = run_answer(_trained, size, network, timeout=_TIMEOUT)
    if None in found:
        raise Wrong("It returned no result of x's shape that can be differentiated.")
    try:
        verdict = tt.check(step, tp=size)
    except ranks.RankError as error:
        raise Wrong(f"Under the checker, {error}") from None
    for rank, (mine, gradients) in enumerate(found):
        if not torch.allclose(mine, y.detach()):
            gap = (mine - y.detach()).abs().max().item()
            raise Wrong(f"The output of rank {rank} is off by {gap:.3g}.")
        for name, gradient in gradients.items():
            want = whole[name].grad
            want = want.chunk(size, _CUT[name])[rank] if name in _CUT else want
            if gradient is None or not torch.allclose(gradient, want):
                said = "" if verdict else f" The checker:\n{verdict.message}"
                raise Wrong(f"On rank {rank} the gradient of {name} is not one process's.{said}")
    if not verdict:
        raise Wrong(f"All is right in numbers, and the checker refuses it:\n{verdict.message}")
    return "Right: equal to one process on two ranks, gradients too, and the checker agrees."


_PLAN = {
    "copy_to forgotten": ("types", "x is I and meets a matrix that is V."),
    "loss divided by N twice, before backward": ("loss", "A factor is no word; it is in the loss."),
    "a rank's tokens begin at position 0": (
        "loss",
        "Positions are numbers; which output has them?",
    ),
    "gradients of norms not summed, sequence cut": ("types", "P comes to the step of what is R."),
    "each epoch in the same order": (None, "Each single step is right."),
    "gradients averaged over tp in place of dp": ("types", "On tp a gradient is I or V, and no P."),
}


@exercise("type_plan")
def _(answer: Any) -> str:
    if not isinstance(answer, dict) or set(answer) != set(_PLAN):
        raise Wrong("One of 'types', 'loss', 'gradients' or None is asked for, for each mistake.")
    for name, (right, why) in _PLAN.items():
        given = answer[name]
        if given not in ("types", "loss", "gradients", None):
            raise Wrong(f"{name!r}: {given!r} is none of 'types', 'loss', 'gradients' and None.")
        if given != right:
            finds = given == "gradients" and right is not None
            told = "It finds it, and something cheaper does as well." if finds else why
            raise Wrong(f"{name!r}: not {given!r}. {told}")
    return "Right: words first, then one step beside one process; time is a third matter."
