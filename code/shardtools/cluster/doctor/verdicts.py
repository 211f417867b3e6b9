"""What all ranks found, the verdicts on it, and the words for both."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardlab.common.machines import Machine

GOOD, NOTE, BAD = "good", "note", "bad"


@dataclass(frozen=True)
class Verdict:
    """One row of the table: a state ("good", "note" or "bad"), its evidence, and the next step."""

    check: str
    state: str
    found: str
    advice: str = ""


@dataclass
class Findings:
    """What all ranks found. `facts`: by rank; see `examine` for the parts."""

    facts: list[dict[str, Any]]
    silent: dict[int, str] = field(default_factory=dict)  # who did not answer, and its last step
    machine: Machine | None = None  # what the planner assumes
    needs: float = 1e9  # bytes that must fit into the folder

    def of(self, part: str) -> dict[int, Any]:
        """Return what each rank found in a part, without ranks that could not tell."""
        return {rank: f[part] for rank, f in enumerate(self.facts) if f.get(part) is not None}

    def hosts(self) -> dict[str, list[int]]:
        """Return the ranks of each host."""
        return grouped(self.of("host"))


def grouped(values: Mapping[int, Hashable]) -> dict[Any, list[int]]:
    """Return the ranks that have each value."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def listed(ranks: Iterable[int]) -> str:
    """Name ranks: "rank 3"; "ranks 0 to 2 and 5"."""
    ranks, words = sorted(ranks), []
    for rank in ranks:
        if rank - 1 in ranks and rank + 1 in ranks:
            words[-1:] = ["to"] if words[-1] == "to" else [words[-1], "to"]
        else:
            words.append(str(rank))
    text = ", ".join(words).replace(", to,", " to")
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(text.rsplit(', ', 1))}"


def size(amount: float, unit: str = "B") -> str:
    """Format an amount with a decimal prefix: "1.5 GB"."""
    for prefix in ("", "k", "M", "G", "T"):
        if amount < 999.5:
            return f"{amount:.3g} {prefix}{unit}"
        amount /= 1000
    return f"{amount:.3g} P{unit}"


def span(values: Iterable[float], unit: str = "B") -> str:
    """Format the least and the largest value: "1.2 GB/s to 1.5 GB/s"."""
    values = list(values)
    low, high = (size(v, unit) for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def count(things: Any, name: str) -> str:
    """Count things: "1 host"; "2 hosts"."""
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"
