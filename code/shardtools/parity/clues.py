"""What the comparison saw on its way to the first wrong tensor, in words: all CLUES that fit.

A new clue is a function of a `Way` that returns a sentence, or "" where it does not fit, and a row
of CLUES.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .across import complete
from .causes import ANOTHER, same, told
from .record import Record
from .recording import Key
from .report import Report, called


@dataclass
class Way:
    """What the comparison saw."""

    report: Report
    addends: list[tuple[Key, str]]
    ranks: Sequence[Any]
    order: list[Key]

    @property
    def plain(self) -> Record:
        """What the plain program computed."""
        return self.ranks[0].plain

    @property
    def first(self) -> Key:
        """The first wrong tensor."""
        return self.report.findings[0].key

    def right_before(self) -> list[Key]:
        """Return the tensors of its phase that were compared before the first wrong one."""
        before = self.order[: self.order.index(self.first)]
        mine = [k for k in before if k[:2] == self.first[:2] and k not in self.report.left_out]
        return [k for k in mine if any(complete(k, self.plain, m) for m in self.ranks)]

    def factors(self) -> dict[int, float]:
        """With which each rank's backward began in that step."""
        step = self.first.step
        return {m.rank: f for m in self.ranks for f in m.factors(step)}


def _began(way: Way) -> str:
    """Addends that somebody should have added up before."""
    at, order = way.first, {key: n for n, key in enumerate(way.order)}
    phase = "backward" if at.phase == "gradient" else at.phase
    found = [a for a in way.addends if a[0][:2] == (at.step, phase) and order[a[0]] <= order[at]]
    output = Key(at.step, phase, at.name.rpartition(".")[0])  # of the module that has the parameter
    added_up = at.phase == "gradient" and output not in (key for key, _ in found)
    if not found or added_up:
        return ""
    key, who = found[0]
    return f"it began with the {called(key)}: ranks {who} have addends of it that nobody added up"


def _right_until(way: Way) -> str:
    """The last that was right before it, where the inside is concerned."""
    at, right = way.first, sorted(way.right_before(), key=lambda key: bool(key.name))
    if at.phase not in ("forward", "backward") or not right:
        return ""
    if any(better(way) for better in (_began, _loss, _uneven)):
        return ""
    said = f"right until the {called(right[-1])}"
    if at.phase == "forward":
        return said
    return (
        f"{said}: between the two, a backward, a sum over ranks or a loss that begins here (an "
        "auxiliary one?) is another one"
    )


def _foreign(way: Way) -> str:
    at = way.first
    if at.phase != "forward" or at.step <= way.ranks[0].begins:
        return ""
    return (
        "every update of the step before was right: other weights are used than the optimizer "
        "left, or other samples"
    )


def _loss(way: Way) -> str:
    if way.first.phase != "backward" or way.right_before():
        return ""
    if name := _shuffled(way):
        return (
            f"the rows of the {name} are those of the plain program, in another order or number: "
            "is it the same batch (sampler, shuffle, seed)?"
        )
    return (
        "every output was right: the loss is another one (its targets, its mask, what divides it)"
    )


def _first(way: Way, phase: str) -> Key:
    """The first tensor of a phase in that step, if any could be compared."""
    keys = [k for k in way.order if k[:2] == (way.first.step, phase)]
    return next((k for k in keys if k not in way.report.left_out), way.first)


def _shuffled(way: Way) -> str:
    """The first output of the step, if its rows are there in no order."""
    first = _first(way, "forward")
    if first.phase != "forward":
        return ""
    calls = [(at, c) for m in way.ranks for (at, _), c in m.calls.items()]
    places = [c.stood[first.name].index[0] for at, c in calls
              if at == first.step and first.name in c.stood]  # fmt: skip
    rows = [index for index in places if isinstance(index, Tensor)]
    unsorted = any((index[index >= 0].diff() <= 0).any() for index in rows)
    return called(first) if unsorted else ""


def _more_telling(way: Way) -> str:
    """What is said of another gradient or update, where the first one has too few numbers."""
    findings = [f for f in way.report.findings if f.key[:2] == way.first[:2]]
    better = next((f for f in findings if not f.words.startswith(ANOTHER)), None)
    return (
        f"and the {called(better.key)} {better.words}" if better and findings[0] != better else ""
    )


def _clipped(way: Way) -> str:
    """All gradients of the step by one factor for each rank."""
    findings = [f for f in way.report.findings if f.key[:2] == way.first[:2]]
    if way.first.phase != "gradient" or len(findings) < 3 or not all(f.factors for f in findings):
        return ""
    by_rank: dict[int, float] = {}
    for finding in findings:
        for rank, factor in finding.factors.items():
            if not same(by_rank.setdefault(rank, factor), factor):
                return ""
    left_out, step = way.report.left_out, way.first[:2]
    every = [key for key in way.order if key[:2] == step and key not in left_out]
    which = (
        "all gradients are" if len(findings) == len(every) else "so are all others that are wrong"
    )
    first = next(iter(by_rank.values()))
    if all(same(factor, first) for factor in by_rank.values()):
        why = "" if ": " in findings[0].words else " (clipped at another norm, or another loss?)"
        return f"{which}, by the same factor{why}"
    return f"{which}, by {told(by_rank)}: was each rank's clipped by a norm of its own?"


def _uneven(way: Way) -> str:
    began, own = way.factors(), [*way.report.findings[0].factors.values()]
    if way.first.phase == "backward" and all(same(f, own[0]) for f in own):
        return ""
    if way.first.phase == "forward" or all(
        same(factor, next(iter(began.values()))) for factor in began.values()
    ):
        return ""
    counts = "is each loss a mean over a rank's own count?"
    where = (
        f"that of the {called(_first(way, 'backward'))}, " if way.first.phase == "backward" else ""
    )
    return f"backward began with other factors: {where}{told(began)}; {counts}"


CLUES = _began, _right_until, _foreign, _loss, _more_telling, _clipped, _uneven


def clues(
    report: Report, addends: list[tuple[Key, str]], ranks: Sequence[Any], order: list[Key]
) -> list[str]:
    """What points to where the first wrong tensor comes from."""
    way = Way(report, addends, ranks, order)
    return [said for clue in CLUES if report.findings and (said := clue(way))]
