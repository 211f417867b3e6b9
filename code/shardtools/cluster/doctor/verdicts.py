"""What all ranks found, what is said to it, and the words for both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shardlab.common.machines import Machine

GOOD, NOTE, BAD = "good", "note", "bad"


@dataclass(frozen=True)
class Verdict:
    """One row of the table. `state`: "good", "note" or "bad"."""

    check: str
    state: str
    found: str
    advice: str = ""


@dataclass
class Findings:
    """What all ranks found. `facts`: by rank; see `examine` for the parts."""

    facts: list[dict[str, Any]]
    silent: dict[int, str] = field(default_factory=dict)  # who did not answer, and where it stood
    machine: Machine | None = None  # what the planner assumes
    needs: float = 1e9  # bytes that shall fit into the folder
    unmeasured: str = ""  # why no link was measured

    def of(self, part: str) -> dict[int, Any]:
        """What the ranks that could tell found."""
        return {rank: f[part] for rank, f in enumerate(self.facts) if f.get(part) is not None}

    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host."""
        found: dict[str, list[int]] = {}
        for rank, host in self.of("host").items():
            found.setdefault(host, []).append(rank)
        return found


def listed(ranks: Iterable[int]) -> str:
    """rank 3; ranks 0 to 2 and 5."""
    ranks = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words: list[str] = []
    for s in spans:
        words += [f"{s[0]} to {s[-1]}"] if len(s) > 2 else map(str, s)
    text = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def size(nbytes: float, unit: str = "B") -> str:
    """Decimal: 1.5 GB."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(nbytes) < 999.5 or prefix == "P":
            return f"{nbytes:.3g} {prefix}{unit}"
        nbytes /= 1000
    raise AssertionError


def span(values: Iterable[float], unit: str = "B") -> str:
    """1.2 to 1.5 GB/s: the least and the most, in words."""
    values = list(values)
    low, high = (size(v, unit) for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def count(things: Any, name: str) -> str:
    """1 host; 2 hosts."""
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"
