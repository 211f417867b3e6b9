"""The report of a comparison: the first wrong tensor, on which ranks, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .hooks import INITIAL_STEP, Key

PHASE_TEXT = {
    "weights": "weights of {}",
    "samples": "samples",
    "forward": "output of {}",
    "backward": "gradient of the output of {}",
    "gradient": "gradient of {}",
    "update": "update of {}",
}


def describe_key(key: Key) -> str:
    """Return a phrase for a tensor, such as "output of blocks.0"."""
    return PHASE_TEXT[key.phase].format(key.name or "the model")


def join_ranks(ranks: Iterable[int]) -> str:
    """Format rank numbers, each once: 0, 1, 3."""
    return ", ".join(map(str, dict.fromkeys(ranks)))


def format_ranks(ranks: list[int]) -> str:
    """Format ranks: rank 1, or ranks 0, 1, 3."""
    return f"rank{'s' if len(ranks) > 1 else ''} {join_ranks(ranks)}"


def format_step(key: Key) -> str:
    """Format the step."""
    return "before the first step, " if key.step == INITIAL_STEP else f"step {key.step + 1}, "


@dataclass
class Finding:
    """A tensor that differs from the plain program's."""

    key: Key
    ranks: list[int]  # ranks on which the tensor is wrong
    message: str  # what is wrong with the tensor
    error: float | None = None  # relative to the tensor's size; None: nothing to measure
    allowed: float = 0.0  # tolerance: the largest error that rounding explains
    factors: dict[int, float] = field(default_factory=dict)  # by rank, if only factors are wrong

    def __str__(self) -> str:
        who = f", {format_ranks(self.ranks)}" if self.ranks else ""
        text = f"{format_step(self.key)}{describe_key(self.key)}{who}: {self.message}"
        if self.error is None:
            return text
        return f"{text} (relative error {self.error:.1e}; tolerance {self.allowed:.1e})"


@dataclass
class Report:
    """The result of a comparison: equal, or else what is wrong. `str` gives a few lines of text."""

    ranks: int
    ranks_before: int = 0  # number of ranks on which a resumed run began
    findings: list[Finding] = field(default_factory=list)  # in the order of the computation
    hints: list[str] = field(default_factory=list)  # possible origins of the first finding
    cut_description: str = ""  # description of a shortened model: see `keep_first_layers`
    num_compared: int = 0  # number of tensors
    num_undecided: int = 0  # tensors that rounding alone changes too much to compare
    unplaced: list[Key] = field(default_factory=list)  # misfits in a step whose gradients are right
    skipped: list[Key] = field(default_factory=list)  # not comparable, such as a rank's own loss
    tolerance_used: dict[str, float] = field(default_factory=dict)  # largest share, by phase
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """True if the parallel program computes what the plain one does."""
        return not self.findings

    def merge_resumed(self, later: Report) -> Report:
        """Return the report of a resumed run, joined with this one of the run before the stop."""
        later.ranks_before = self.ranks
        later.num_compared += self.num_compared
        later.num_undecided += self.num_undecided
        for phase, used in self.tolerance_used.items():
            later.tolerance_used[phase] = max(used, later.tolerance_used.get(phase, 0.0))
        later.unplaced = self.unplaced + later.unplaced
        return later

    @property
    def first_finding(self) -> Finding | None:
        """The first wrong tensor; later ones may be its consequences."""
        return self.findings[0] if self.findings else None

    @property
    def phase_findings(self) -> list[Finding]:
        """The first wrong tensor, and the others of its step and phase."""
        return [f for f in self.findings if f.key[:2] == self.first_finding.key[:2]]

    def __str__(self) -> str:
        if self.is_equal:
            worst = max(self.tolerance_used.values(), default=0.0)
            before = f"{self.ranks_before} and then " if self.ranks_before else ""
            lines = [
                f"equal: {self.num_compared} tensors on {before}{self.ranks} ranks; "
                f"the largest error is {worst:.0%} of the tolerance"
            ]
            if n := self.num_undecided:
                noun, them = ("more tensors were", "them") if n > 1 else ("more tensor was", "it")
                lines.append(f"  {n} {noun} not compared: rounding alone changes {them} too much")
            outputs = [key for key in self.skipped if key.phase == "forward" and key.name]
            if outputs:
                noun = "outputs were" if len(outputs) > 1 else "output was"
                lines.append(
                    f"  {len(outputs)} {noun} not compared, first the {describe_key(outputs[0])}: "
                    "a scalar, or no rank recorded it (compiled before `watch`?)"
                )
            if n := len(self.unplaced):
                noun = "outputs or their gradients match" if n > 1 else "output or gradient matches"
                lines.append(
                    f"  {n} {noun} no part of the plain tensor, first the "
                    f"{describe_key(self.unplaced[0])}: all weight gradients of its step are right"
                )
            if self.cut_description:
                lines.append(f"  compared with a shortened model: {self.cut_description}")
            return "\n".join(lines)
        lines = [str(self.first_finding), *(f"  {hint}" for hint in self.hints)]
        if (more := len(self.phase_findings) - 1) > 0:
            wrong = f"wrong tensor{'s' if more > 1 else ''} in this phase of the step"
            lines.append(f"  and {more} more {wrong}; later tensors are not compared")
        return "\n".join(lines)
