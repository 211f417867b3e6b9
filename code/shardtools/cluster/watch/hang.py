"""Name the rank that a hanging job waits for, with the collective and the line.

    python -m shardlab cluster hang runs/one/flight
    torchfrtrace runs/one/flight -p trace_              # torch's tool; also for send and recv

FOLDER has the flight recorder's record of each rank, written by `flight.Watchdog` or NCCL's own
watchdog. Within a group, the n-th call of one rank must be the n-th call of all ranks. Unlike
torch's tool (2.13), which takes the first record as right, the command takes the majority as right;
it follows the waiting from rank to rank, across groups, and prints the last call of the first rank.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlab.ranks import root_cause
from shardtools import options

from .flight import Call, read_records

Calls = Mapping[int, Sequence[Call]]
Numbered = dict[int, dict[int, Call]]  # the calls of a group, by number and rank
# Collectives in which every rank's input has the same shape.
_SAME_SHAPE_OPS = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}


@dataclass(frozen=True)
class Finding:
    """A collective that not all ranks entered."""

    kind: str  # "missing", "differs" (other call or size) or "cycle"
    ranks: tuple[int, ...]  # ranks that are missing, differ from most, or form the cycle
    call: Call  # the call of the waiting ranks
    waiting: tuple[int, ...]  # ranks that are in the call
    last_calls: dict[int, Call | None]  # the last call of each of `ranks` that left a record

    def __str__(self) -> str:
        call = self.call
        name = f"{call.op} #{call.number} of {call.group}, line {call.line} in {call.location}"
        ranks, present = (
            root_cause.format_ranks([*self.ranks]),
            root_cause.format_ranks([*self.waiting]),
        )
        waits = "wait" if len(self.waiting) > 1 else "waits"
        differs = f"{name}: called by {present}, while {ranks} called something else:\n  {call}"
        lines = {
            "missing": f"{name}: {present} {waits} for {ranks}; the last call:",
            "differs": differs,
            "cycle": f"{ranks} wait for one another, each in another call:",
        }
        found = [lines[self.kind]]
        for rank in self.ranks:
            none = "no call at all" if rank in self.last_calls else "no record"
            found.append(f"  {self.last_calls.get(rank) or f'rank {rank}  {none}'}")
        return "\n".join(found)


def find_causes(calls: Calls) -> list[Finding]:
    """Return the first mismatch of each group, the cause of the hang first.

    Returns [] if no rank waits, or if all members have entered the call in which ranks wait.
    """
    groups: dict[tuple[str, tuple[int, ...]], Numbered] = {}
    for rank, mine in calls.items():
        for call in mine:
            group = groups.setdefault((call.group, call.members), {})
            group.setdefault(call.number, {})[rank] = call
    waiting = {rank: [call for call in mine if call.waiting] for rank, mine in calls.items()}
    stuck = {rank: mine[0] for rank, mine in waiting.items() if mine}

    def find_awaited(rank: int) -> list[int]:
        """Return the stuck ranks that have not entered the call in which this rank is stuck."""
        call = stuck[rank]
        came = groups[call.group, call.members][call.number]
        return [other for other in call.members if other not in came and other in stuck]

    for rank in stuck:
        path = [rank]
        while ahead := find_awaited(path[-1]):
            if ahead[0] in path:
                cycle = tuple(sorted(path[path.index(ahead[0]) :]))
                return [
                    Finding("cycle", cycle, stuck[cycle[0]], cycle, {r: stuck[r] for r in cycle})
                ]
            path.append(ahead[0])
    found = [_find_mismatch(calls, members, numbers) for (_, members), numbers in groups.items()]
    # A finding whose ranks wait nowhere else is the cause.
    return sorted(filter(None, found), key=lambda one: any(rank in stuck for rank in one.ranks))


def _find_mismatch(calls: Calls, members: tuple[int, ...], numbers: Numbered) -> Finding | None:
    """Find the first call number in a group at which its members disagree."""
    oldest: dict[int, int] = {}  # by rank: the oldest number in its record
    for number in sorted(numbers):
        for rank in numbers[number]:
            oldest.setdefault(rank, number)
    for number in sorted(numbers):
        if number < max(oldest.values()):  # a record is a ring buffer, without its oldest calls
            continue
        entered = numbers[number]
        shapes = {rank: _get_signature(call) for rank, call in entered.items()}
        [(most, _)] = Counter(shapes.values()).most_common(1)
        agree = [rank for rank in entered if shapes[rank] == most]
        call, odd = entered[agree[0]], tuple(rank for rank in entered if shapes[rank] != most)
        if odd:
            others = {rank: entered[rank] for rank in odd}
            return Finding("differs", odd, call, tuple(agree), others)
        missing = tuple(rank for rank in members if rank not in entered)
        if missing and any(call.waiting for call in entered.values()):
            # A rank without a record may have entered: it is named only if no other is missing.
            missing = tuple(rank for rank in missing if rank in calls) or missing
            last = {rank: next(reversed(calls[rank]), None) for rank in missing if rank in calls}
            return Finding("missing", missing, call, tuple(entered), last)
    return None


def _get_signature(call: Call) -> tuple[object, ...]:
    """Return the values that must be equal on all ranks of a group."""
    return (call.op, call.sizes, call.dtype) if call.op in _SAME_SHAPE_OPS else (call.op,)


def add_hang(commands: argparse._SubParsersAction) -> None:
    """Add `hang` to the command line."""
    parser = options.add_parser(commands, "hang", __doc__)
    parser.add_argument("folder", help="folder with a record of each rank", metavar="FOLDER")
    parser.set_defaults(command=_main)


def _main(args: argparse.Namespace) -> int:
    calls = read_records(args.folder)
    members = {rank for mine in calls.values() for call in mine for rank in call.members}
    if silent := sorted(members - set(calls)):
        print(f"{root_cause.format_ranks(silent)} left no record: dead, or stuck outside of Python")
    none = "no collective lacks a rank: check send and recv with torchfrtrace, then the links"
    print(*find_causes(calls) or [none], sep="\n")
    return 0
