"""The report of a comparison: the first wrong tensor, on which ranks, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .recording import BEFORE, Key

OF = {
    "weights": "weights of {}",
    "samples": "samples",
    "forward": "output of {}",
    "backward": "gradient of the output of {}",
    "gradient": "gradient of {}",
    "update": "update of {}",
}


def called(key: Key) -> str:
    """Name a tensor in words."""
    return OF[key.phase].format(key.name or "the model")


def listed(ranks: Iterable[int]) -> str:
    """Format rank numbers, each once: 0, 1, 3."""
    return ", ".join(map(str, dict.fromkeys(ranks)))


def of_ranks(ranks: list[int]) -> str:
    """Format ranks: rank 1, or ranks 0, 1, 3."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def when(key: Key) -> str:
    """Format the step."""
    return "before the first step, " if key.step == BEFORE else f"step {key.step + 1}, "


@dataclass
class Finding:
    """A tensor that differs from the plain program's."""

    key: Key
    ranks: list[int]  # ranks on which the tensor is wrong
    words: str  # what is wrong with the tensor
    error: float | None = None  # relative to the tensor's size; None: nothing to measure
    allowed: float = 0.0  # part of the error that rounding explains
    factors: dict[int, float] = field(default_factory=dict)  # by rank, if only factors are wrong

    def __str__(self) -> str:
        who = f", {of_ranks(self.ranks)}" if self.ranks else ""
        said = f"{when(self.key)}{called(self.key)}{who}: {self.words}"
        if self.error is None:
            return said
        explains = f"rounding explains {self.allowed:.1e}"
        return f"{said} (off by {self.error:.1e} of its size; {explains})"


@dataclass
class Report:
    """The result of a comparison: equal, or else what is wrong. `str` says it in a few lines."""

    ranks: int
    resumed: int = 0  # number of ranks on which a resumed run began
    findings: list[Finding] = field(default_factory=list)  # in the order of the computation
    clues: list[str] = field(default_factory=list)  # clues to the origin of the first finding
    fewer: str = ""  # description of a shortened model: see `first_layers`
    compared: int = 0  # number of tensors
    undecided: int = 0  # tensors that rounding alone changes too much to compare
    unplaced: list[Key] = field(default_factory=list)  # misfits in a step whose gradients are right
    left_out: list[Key] = field(default_factory=list)  # not comparable, such as a rank's own loss
    worst: dict[str, float] = field(default_factory=dict)  # by phase, relative to the tolerance
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """True if the parallel program computes what the plain one does."""
        return not self.findings

    def then(self, later: Report) -> Report:
        """Return the report of a resumed run, with this report of the run until it was stopped."""
        later.resumed = self.ranks
        later.compared += self.compared
        later.undecided += self.undecided
        worst = {**self.worst, **later.worst}
        later.worst = {k: max(v, self.worst.get(k, 0.0)) for k, v in worst.items()}
        later.unplaced = self.unplaced + later.unplaced
        return later

    @property
    def first(self) -> Finding | None:
        """The first wrong tensor; later ones may be its consequences."""
        return self.findings[0] if self.findings else None

    @property
    def like_first(self) -> list[Finding]:
        """The first wrong tensor, and the others of its step and phase."""
        return [f for f in self.findings if f.key[:2] == self.first.key[:2]]

    def __str__(self) -> str:
        if self.equal:
            worst = max(self.worst.values(), default=0.0)
            where = f"{self.resumed} and then {self.ranks}" if self.resumed else f"{self.ranks}"
            lines = [
                f"equal: {self.compared} tensors on {where} ranks; "
                f"the worst is off by {worst:.0%} of what is allowed to rounding"
            ]
            if self.undecided:
                lines.append(f"  of {self.undecided} more, rounding alone makes other ones")
            lost = [k for k in self.left_out if k.phase == "forward" and k.name]
            if lost:
                lines.append(
                    f"  {len(lost)} have nothing to be compared with, first the {called(lost[0])}: "
                    "a number alone, or no rank has it (compiled before it was watched?)"
                )
            if self.unplaced:
                lines.append(
                    f"  of {len(self.unplaced)} not every part was found, first of the "
                    f"{called(self.unplaced[0])}: all gradients of weights in its step are right"
                )
            if self.fewer:
                lines.append(f"  compared at {self.fewer}")
            return "\n".join(lines)
        lines = [str(self.first), *(f"  {clue}" for clue in self.clues)]
        if (more := len(self.like_first) - 1) > 0:
            lines.append(f"  and {more} more like it in this step; what follows is not judged")
        return "\n".join(lines)
