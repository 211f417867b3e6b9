"""Causes in state that steps hand on, or that checkpoints restore.

Such state is weights, optimizer moments and step counts, the learning rate, and the data's
position. CARRIED is a table of causes, like `causes.CAUSES`, and is tried first.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from .causes import CAUSES, Case, told
from .noise import gap, rms
from .places import proposals
from .recording import BEFORE

CALLED = {"lr": "learning rate", "step": "optimizer's count of steps", "weight_decay": "decay"}
UNUSED = {"initial_lr"}  # optimizer options without effect
NEAR = 0.02  # relative rest of a fit below which the fit explains the tensor
LIKELY = 0.5  # share of the difference below which another step's tensor explains it
FEW = 8  # places of another step's tensor that are tried


def _weights(case: Case) -> str:
    """Explain the weights of a resumed run: those of an earlier step, or others."""
    if case.key.phase != "weights" or case.key.step == BEFORE:
        return ""
    for step in sorted(k.step for k in case.plain.parts if k[1:] == case.key[1:]):
        old = case.whole(step=step)
        if all(case.alike(v.found, v.place.of(old).double()) for v in case.wrong):
            since = f"step {step + 1}" if step != BEFORE else "the first step: not loaded?"
            return f"are those from before {since}"
    return "are other ones than those of the run that goes through: not loaded, or another's?"


def _other_optimizer(case: Case) -> str:
    """Explain an update that an optimizer of another class made."""
    wanted = case.plain.parts[case.key][0].optimizer
    mine = {part.optimizer for part in case.made_by().values()} - {""}
    if case.key.phase != "update" or not wanted or not mine or wanted in mine:
        return ""
    made = " and ".join(sorted(mine))
    return f"is another optimizer's: {made} made it, and {wanted} in the plain program"


def _anew(case: Case) -> str:
    """Explain an update by a fresh optimizer: Adam's or momentum's first step."""
    gradient = case.whole(phase="gradient") if case.key.phase == "update" else None
    if gradient is None:
        return ""
    value = case.wrong[0]
    g = value.place.of(gradient).double().view(value.found.shape)
    weight = case.whole(phase="weights", step=case.key.step or BEFORE)
    w = None if weight is None else value.place.of(weight).double().view(value.found.shape)
    for along, words in (
        (g.sign(), "every number moves by {:.3g} against its gradient, as in Adam's first step"),
        (g, "it is {:.3g} times its gradient, against it, and nothing else"),
    ):
        by, left = _fit(value.found, along, w)
        if by < 0 and left < NEAR < _fit(value.wanted, along, w)[1]:
            return words.format(-by) + ": as if the optimizer began anew (moments not loaded?)"
    return ""


def _fit(x: Tensor, along: Tensor, w: Tensor | None) -> tuple[float, float]:
    """Fit x to a multiple of `along` plus one of `w`; return the first factor, and the rest."""
    columns = torch.stack([t.flatten() for t in (along, w) if t is not None], 1)
    factors = torch.linalg.lstsq(columns, x.flatten()[:, None]).solution
    left = rms(x.flatten() - (columns @ factors).flatten()) / max(rms(x), 1e-300)
    return factors[0].item(), left


def _inputs(case: Case) -> str:
    """Explain a first output that is much nearer to that of another step."""
    if case.key.phase != "forward":
        return ""
    value, whole = case.wrong[0], tuple(case.near.whole.shape)
    off: dict[int, float] = {}
    for step in sorted({k.step for k in case.plain.parts} - {BEFORE, case.key.step}):
        other = case.whole(step=step)
        if other is None or other.shape != whole:
            continue
        places = [value.place, *islice(proposals(value.found.shape, whole, value.rank), FEW)]
        theirs = (p.of(other).double().view(value.found.shape) for p in places)
        off[step] = min(gap(value.found, x, 1.0)[0] for x in theirs)
    step = min(off, key=off.__getitem__, default=0)
    if not off or off[step] >= LIKELY * gap(value.found, value.wanted, 1.0)[0]:
        return ""
    begins = case.key.step == case.ranks[0].begins and step == 0
    why = "do the data begin anew?" if begins else "are they that step's samples?"
    return f"is nearest to that of step {step + 1}: {why}"


def _random_state(case: Case) -> str:
    """Explain a resumed run's first output in which random numbers are drawn."""
    drew = any(s.part.drew for m in case.ranks for s in m.seen.get(case.key, ()))
    resumed = case.key.phase == "forward" and case.key.step == case.ranks[0].begins > 0
    return "random numbers are drawn here: was their state restored?" if drew and resumed else ""


CARRIED = _weights, _other_optimizer, _anew, _inputs, _random_state


def options(case: Case) -> str:
    """List options of an update's optimizer that differ, such as its rate or step count."""
    right = {} if _other_optimizer(case) else case.plain.parts[case.key][0].options
    mine = {rank: part.options for rank, part in case.made_by().items()}
    said = []
    for name in sorted(right.keys() - UNUSED):
        other = {rank: float(found[name]) for rank, found in mine.items() if name in found}
        if any(abs(found - right[name]) > 1e-9 * abs(right[name]) for found in other.values()):
            one = next(iter(other.values()))
            alike = len(set(other.values())) == 1
            is_ = f"{one:.4g}" if alike else told(other)
            what = CALLED.get(name, name)
            said.append(f"the {what} is {is_}, and {right[name]:.4g} in the plain program")
    return "; ".join(said)


def in_words(case: Case) -> str:
    """Explain a wrong tensor: state not carried over, or a cause; and options that differ."""
    said = next(words for each in (*CARRIED, *CAUSES) if (words := each(case)))
    return "; ".join(filter(None, (said, options(case))))
