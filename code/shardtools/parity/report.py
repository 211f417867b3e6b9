"""What is said of a comparison: the first tensor that is wrong, on which ranks, and why."""

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
    """A tensor in words."""
    return OF[key.phase].format(key.name or "the model")


def listed(ranks: Iterable[int]) -> str:
    """Numbers of ranks, each once: 0, 1, 3."""
    return ", ".join(map(str, dict.fromkeys(ranks)))


def of_ranks(ranks: list[int]) -> str:
    """Ranks in words: rank 1, or ranks 0, 1, 3."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def when(key: Key) -> str:
    """In which step, in words."""
    return "before the first step, " if key.step == BEFORE else f"step {key.step + 1}, "


@dataclass
class Finding:
    """A tensor that is another one than the plain program's."""

    key: Key
    ranks: list[int]  # on which
    words: str  # what is wrong with it
    error: float | None = None  # relative to its size; None: there is nothing to measure
    allowed: float = 0.0  # how much of that rounding explains
    factors: dict[int, float] = field(default_factory=dict)  # of ranks, if nothing else is wrong

    def __str__(self) -> str:
        who = f", {of_ranks(self.ranks)}" if self.ranks else ""
        said = f"{when(self.key)}{called(self.key)}{who}: {self.words}"
        if self.error is None:
            return said
        explains = f"rounding explains {self.allowed:.1e}"
        return f"{said} (off by {self.error:.1e} of its size; {explains})"


@dataclass
class Report:
    """Whether all is equal, and what is wrong if not. `str` says it in a few lines."""

    ranks: int
    resumed: int = 0  # of a run that was resumed: on how many ranks it began
    findings: list[Finding] = field(default_factory=list)  # in the order of the computation
    clues: list[str] = field(default_factory=list)  # what else was seen on the way to the first
    fewer: str = ""  # of how many layers: see `first_layers`
    compared: int = 0  # tensors
    undecided: int = 0  # of which rounding alone makes another one: nothing can be said
    unplaced: list[Key] = field(default_factory=list)  # inside, in a step whose ends are right
    left_out: list[Key] = field(default_factory=list)  # no part of a whole: a rank's own loss
    worst: dict[str, float] = field(default_factory=dict)  # by phase, as a part of what is allowed
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether the parallel program computes what the plain one does."""
        return not self.findings

    def then(self, later: Report) -> Report:
        """Of a run that was right until it was stopped, with what came after."""
        later.resumed = self.ranks
        later.compared += self.compared
        later.undecided += self.undecided
        worst = {**self.worst, **later.worst}
        later.worst = {k: max(v, self.worst.get(k, 0.0)) for k, v in worst.items()}
        later.unplaced = self.unplaced + later.unplaced
        return later

    @property
    def first(self) -> Finding | None:
        """What is wrong first; what comes behind may be its consequence."""
        return self.findings[0] if self.findings else None

    @property
    def like_first(self) -> list[Finding]:
        """It, and the others of its step and phase."""
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
