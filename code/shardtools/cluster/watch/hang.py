"""It hangs: which rank is missing, in which collective, at which line.

    python -m shardlab cluster hang runs/one/flight
    torchfrtrace runs/one/flight -p trace_              # torch's own, for sends and recvs as well

Reads the records that all ranks left (see `flight`), and compares the collectives: within a group,
the n-th call of one rank must be the n-th call of all. Beyond torch's tool (2.13) it asks the
majority, where that takes the first record as right; follows who waits for whom, across groups, to
the rank at which the waiting begins; and says what that rank called last.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtools import options

from .flight import Call, read

Calls = Mapping[int, Sequence[Call]]
# Collectives into which every rank puts a tensor of one shape.
_ALIKE = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}


@dataclass(frozen=True)
class Finding:
    """A collective that does not come about."""

    kind: str  # "missing", "differs" (another call or size) or "cycle"
    ranks: tuple[int, ...]  # missing, or different from most; in a cycle, all of it
    call: Call  # as those called it who wait
    waiting: tuple[int, ...]  # ranks that are in it
    stands: dict[int, Call | None]  # the last call of each of `ranks` that left a record

    def __str__(self) -> str:
        call = self.call
        name = f"{call.op} #{call.number} of {call.group}, line {call.line} in {call.where}"
        ranks, present = _named(self.ranks), _named(self.waiting)
        waits = "wait" if len(self.waiting) > 1 else "waits"
        differs = f"{name}: called by {present}, while {ranks} called something else:\n  {call}"
        lines = {
            "missing": f"{name}: {present} {waits} for {ranks}, whose last call is:",
            "differs": differs,
            "cycle": f"{ranks} wait for one another, each in another call:",
        }
        found = [lines[self.kind]]
        for rank in self.ranks:
            none = "no call at all" if rank in self.stands else "no record"
            found.append(f"  {self.stands.get(rank) or f'rank {rank}  {none}'}")
        return "\n".join(found)


def explain(calls: Calls) -> list[Finding]:
    """Return why the ranks stand still: the first disagreement of each group, the cause first.

    Nothing is found where no rank waits, and where all have come to the call in which they wait.
    """
    stuck = {r: next(c for c in mine if c.waiting) for r, mine in calls.items() if _waits(mine)}
    if cycle := _cycle(calls, stuck):
        return [Finding("cycle", cycle, stuck[cycle[0]], cycle, {r: stuck[r] for r in cycle})]
    groups = dict.fromkeys((c.group, c.members) for mine in calls.values() for c in mine)
    found = [finding for group in groups if (finding := _first(calls, *group))]
    # Whoever waits nowhere else is where the waiting begins.
    return sorted(found, key=lambda finding: any(rank in stuck for rank in finding.ranks))


def _waits(mine: Sequence[Call]) -> bool:
    return any(call.waiting for call in mine)


def _first(calls: Calls, name: str, members: tuple[int, ...]) -> Finding | None:
    """Find the first number in a group at which its members part ways."""
    by_number = {
        rank: {c.number: c for c in calls[rank] if (c.group, c.members) == (name, members)}
        for rank in members
        if rank in calls  # the others left no record
    }
    # A record is a ring: its oldest calls may be gone, on one rank sooner than on another.
    oldest = max((min(mine) for mine in by_number.values() if mine), default=1)
    newest = max((max(mine) for mine in by_number.values() if mine), default=0)
    for number in range(oldest, newest + 1):
        here = {rank: mine[number] for rank, mine in by_number.items() if number in mine}
        shapes = {rank: _shape(call) for rank, call in here.items()}
        [(most, _)] = Counter(shapes.values()).most_common(1)
        agree = [rank for rank in here if shapes[rank] == most]
        call, odd = here[agree[0]], tuple(rank for rank in here if shapes[rank] != most)
        if odd:
            return Finding("differs", odd, call, tuple(agree), {rank: here[rank] for rank in odd})
        if not _waits([*here.values()]):
            continue
        missing = tuple(rank for rank in by_number if rank not in here)
        missing = missing or tuple(rank for rank in members if rank not in calls)
        if missing:
            last = {rank: next(reversed(calls[rank]), None) for rank in missing if rank in calls}
            return Finding("missing", missing, call, tuple(here), last)
    return None


def _shape(call: Call) -> tuple[object, ...]:
    """Return what has to be equal on all ranks of a group."""
    return (call.op, call.sizes, call.dtype) if call.op in _ALIKE else (call.op,)


def _cycle(calls: Calls, stuck: Mapping[int, Call]) -> tuple[int, ...]:
    """Find ranks that wait for one another in a circle (empty if there is none)."""

    def awaited(mine: Call) -> list[int]:
        same = mine.group, mine.members, mine.number
        came = {
            other
            for other in mine.members
            for call in calls.get(other, ())
            if (call.group, call.members, call.number) == same
        }
        return [other for other in mine.members if other not in came and other in stuck]

    for start in stuck:
        path = [start]
        while ahead := awaited(stuck[path[-1]]):
            if ahead[0] in path:
                return tuple(sorted(path[path.index(ahead[0]) :]))
            path.append(ahead[0])
    return ()


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def add_hang(commands: argparse._SubParsersAction) -> None:
    """Add `hang` to the command line."""
    parser = options.command(commands, "hang", __doc__)
    parser.add_argument("folder", help="with a record of each rank", metavar="FOLDER")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    calls = read(chosen.folder)
    members = {rank for mine in calls.values() for call in mine for rank in call.members}
    if silent := sorted(members - set(calls)):
        print(f"{_named(silent)} left no record: dead, or stuck where Python cannot run")
    none = "no collective lacks a rank: look at sends and at GPUs with torchfrtrace, else at links"
    print(*explain(calls) or [none], sep="\n")
    return 0
