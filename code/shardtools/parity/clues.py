"""Clues to the origin of the first wrong tensor, in words: all CLUES that fit.

A new clue is a function of the `Judge` that returns a sentence, or "" if it does not fit, and a
row of CLUES.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .across import complete
from .causes import ANOTHER, all_same, same, told
from .recording import Key
from .report import called

if TYPE_CHECKING:
    from .judge import Judge


def _right_before(judge: Judge) -> list[Key]:
    """Return the compared tensors of the same phase before the first wrong one."""
    at = judge.report.first.key
    before = [k for k in judge.order[: judge.order.index(at)] if k[:2] == at[:2]]
    whole = (k for k in before if any(complete(k, judge.plain, m) for m in judge.ranks))
    return [k for k in whole if k not in judge.report.left_out]


def _factors(judge: Judge) -> dict[int, float]:
    """Return the factors with which each rank's backward began in that step."""
    step = judge.report.first.key.step
    return {m.rank: f for m in judge.ranks for f in m.factors(step)}


def _began(judge: Judge) -> str:
    """Name the first partial sum before the wrong tensor that nobody all-reduced."""
    at, order = judge.report.first.key, judge.order
    phase = "backward" if at.phase == "gradient" else at.phase
    before = order[: order.index(at) + 1]
    found = [a for a in judge.addends if a[0][:2] == (at.step, phase) and a[0] in before]
    output = Key(at.step, phase, at.name.rpartition(".")[0])  # of the module that has the parameter
    added_up = at.phase == "gradient" and output not in (key for key, _ in found)
    if not found or added_up:
        return ""
    key, who = found[0]
    return f"it began with the {called(key)}: ranks {who} have addends of it that nobody added up"


def _right_until(judge: Judge) -> str:
    """Name the last right tensor before the first wrong output or output gradient."""
    at, right = judge.report.first.key, sorted(_right_before(judge), key=lambda key: bool(key.name))
    if at.phase not in ("forward", "backward") or not right:
        return ""
    if any(better(judge) for better in (_began, _loss, _uneven)):
        return ""
    said = f"right until the {called(right[-1])}"
    if at.phase == "forward":
        return said
    return (
        f"{said}: between the two, a backward, a sum over ranks or a loss that begins here (an "
        "auxiliary one?) is another one"
    )


def _foreign(judge: Judge) -> str:
    at = judge.report.first.key
    if at.phase != "forward" or at.step <= judge.ranks[0].begins:
        return ""
    return (
        "every update of the step before was right: other weights are used than the optimizer "
        "left, or other samples"
    )


def _loss(judge: Judge) -> str:
    if judge.report.first.key.phase != "backward" or _right_before(judge):
        return ""
    if name := _shuffled(judge):
        return (
            f"the rows of the {name} are those of the plain program, in another order or number: "
            "is it the same batch (sampler, shuffle, seed)?"
        )
    return (
        "every output was right: the loss is another one (its targets, its mask, what divides it)"
    )


def _first(judge: Judge, phase: str) -> Key:
    """Return the first tensor of a phase in that step, or the first that could be compared."""
    keys = [k for k in judge.order if k[:2] == (judge.report.first.key.step, phase)]
    return next((k for k in keys if k not in judge.report.left_out), judge.report.first.key)


def _shuffled(judge: Judge) -> str:
    """Name the step's first output if its rows stand out of order."""
    first = _first(judge, "forward")
    if first.phase != "forward":
        return ""
    calls = [(at, c) for m in judge.ranks for (at, _), c in m.calls.items()]
    places = [c.stood[first.name].index[0] for at, c in calls
              if at == first.step and first.name in c.stood]  # fmt: skip
    rows = [index for index in places if isinstance(index, Tensor)]
    unsorted = any((index[index >= 0].diff() <= 0).any() for index in rows)
    return called(first) if unsorted else ""


def _more_telling(judge: Judge) -> str:
    """Quote another gradient or update with an explanation, if the first wrong one has none."""
    first, *others = judge.report.like_first
    if not first.words.startswith(ANOTHER):
        return ""
    better = next((f for f in others if not f.words.startswith(ANOTHER)), None)
    return f"and the {called(better.key)} {better.words}" if better else ""


def _clipped(judge: Judge) -> str:
    """Say if all wrong gradients of the step are off by one factor for each rank."""
    findings, at = judge.report.like_first, judge.report.first.key
    if at.phase != "gradient" or len(findings) < 3 or not all(f.factors for f in findings):
        return ""
    by_rank: dict[int, float] = {}
    for finding in findings:
        for rank, factor in finding.factors.items():
            if not same(by_rank.setdefault(rank, factor), factor):
                return ""
    every = [k for k in judge.order if k[:2] == at[:2] and k not in judge.report.left_out]
    which = (
        "all gradients are" if len(findings) == len(every) else "so are all others that are wrong"
    )
    if all_same(by_rank.values()):
        why = "" if ": " in findings[0].words else " (clipped at another norm, or another loss?)"
        return f"{which}, by the same factor{why}"
    return f"{which}, by {told(by_rank)}: was each rank's clipped by a norm of its own?"


def _uneven(judge: Judge) -> str:
    first, began = judge.report.first, _factors(judge)
    backward = first.key.phase == "backward"
    if first.key.phase == "forward" or all_same(began.values()):
        return ""
    if backward and all_same(first.factors.values()):
        return ""
    where = f"that of the {called(_first(judge, 'backward'))}, " if backward else ""
    counts = "is each loss a mean over a rank's own count?"
    return f"backward began with other factors: {where}{told(began)}; {counts}"


CLUES = _began, _right_until, _foreign, _loss, _more_telling, _clipped, _uneven


def clues(judge: Judge) -> list[str]:
    """Return the clues to the origin of the first wrong tensor."""
    return [said for clue in CLUES if not judge.report.equal and (said := clue(judge))]
