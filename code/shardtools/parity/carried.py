"""What one step hands to the next, and a checkpoint to whoever resumes: is it what it should be?

Weights, an optimizer's moments and its count of steps, the learning rate's schedule, where the data
stand. CARRIED is a table of causes, as `causes.CAUSES` is, and is asked before it.
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
UNUSED = {"initial_lr"}  # of an optimizer's options
NEAR = 0.02  # of what a fit leaves over: it is what it was fitted to
LIKELY = 0.5  # another step's tensor that is nearer by so much is meant
FEW = 8  # places of it that are tried


def _weights(case: Case) -> str:
    """Of a run that is resumed: those of an earlier step, or others."""
    if case.key.phase != "weights" or case.key.step == BEFORE:
        return ""
    for step in sorted(k.step for k in case.plain.parts if k[1:] == case.key[1:]):
        old = case.whole(step=step)
        if all(case.alike(v.found, v.place.of(old).double()) for v in case.wrong):
            since = f"step {step + 1}" if step != BEFORE else "the first step: not loaded?"
            return f"are those from before {since}"
    return "are other ones than those of the run that goes through: not loaded, or another's?"


def _other_optimizer(case: Case) -> str:
    """Of an update: made by one of another class than in the plain program."""
    wanted = case.plain.parts[case.key][0].optimizer
    mine = {part.optimizer for part in case.made_by().values()} - {""}
    if case.key.phase != "update" or not wanted or not mine or wanted in mine:
        return ""
    made = " and ".join(sorted(mine))
    return f"is another optimizer's: {made} made it, and {wanted} in the plain program"


def _anew(case: Case) -> str:
    """Adam's first step moves all numbers alike; a first one with momentum goes by its gradient."""
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
    """x as a factor of `along` and one of `w`: the first, and what is left over, of its size."""
    columns = torch.stack([t.flatten() for t in (along, w) if t is not None], 1)
    factors = torch.linalg.lstsq(columns, x.flatten()[:, None]).solution
    left = rms(x.flatten() - (columns @ factors).flatten()) / max(rms(x), 1e-300)
    return factors[0].item(), left


def _inputs(case: Case) -> str:
    """The first output is much nearer to another step's."""
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
    """Of a run that is resumed."""
    drew = any(s.part.drew for m in case.ranks for s in m.seen.get(case.key, ()))
    resumed = case.key.phase == "forward" and case.key.step == case.ranks[0].begins > 0
    return "random numbers are drawn here: was their state restored?" if drew and resumed else ""


CARRIED = _weights, _other_optimizer, _anew, _inputs, _random_state


def options(case: Case) -> str:
    """Of an update: where its optimizer had another rate, say, or another count of steps."""
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
    """What is wrong with a tensor: what was not carried, or a cause; and options that differ."""
    said = next(words for each in (*CARRIED, *CAUSES) if (words := each(case)))
    return "; ".join(filter(None, (said, options(case))))
