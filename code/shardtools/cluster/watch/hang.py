"""It hangs: which rank is missing, in which collective, at which line.

    python -m shardlab cluster hang runs/one/flight

Reads the records that all ranks left (see `flight`), and compares them as `torchfrtrace` does:
within a group, the n-th call of one rank must be the n-th call of all, and a send meet its recv.
With nccl a host may have queued what its GPU never comes to: the states of a call tell. Beyond that
tool (torch 2.13) it asks the majority, where that takes the first record as right; it follows who
waits for whom, across groups, to the rank at which the waiting begins, which is seldom the one that
complained; and says what that rank called last.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shardtools import options

from .flight import STATES, Call, read

Calls = Mapping[int, Sequence[Call]]
# Collectives into which every rank puts a tensor of one shape.
_ALIKE = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}


@dataclass(frozen=True)
class Finding:
    """A collective, or a send and its recv, that does not come about."""

    # "missing", "differs" (another call or size), "behind" (on the GPU), "cycle", or "together":
    # nobody is missing, and yet it does not end.
    kind: str
    ranks: tuple[int, ...]  # missing, behind, or different from most; in a cycle, all of it
    call: Call  # as those called it who wait
    waiting: tuple[int, ...]  # ranks that are in it
    stands: dict[int, Call | None]  # the last call of each of `ranks` that left a record

    def __str__(self) -> str:
        call = self.call
        name = f"{call.op} #{call.number} of {call.group}, line {call.line} in {call.where}"
        ranks, present = _named(self.ranks), _named(self.waiting)
        waits = "wait" if len(self.waiting) > 1 else "waits"
        if self.kind == "cycle":
            lines = [f"{ranks} wait for one another, each in another call:"]
        elif self.kind == "together":
            lines = [f"{name}: {present} {waits} in it, and no rank is missing:"]
            if call.state == "started":
                lines.append("  started everywhere, so a link or a network card does not go on")
            else:
                order = "" if call.peer is None else "all send before they receive, "
                lines.append(f"  it is slow, {order}or a link or a network card does not go on")
                lines.append("  (TORCH_NCCL_ENABLE_TIMING=1 notes whether all GPUs have started)")
        elif self.kind == "differs" and not self.waiting:
            lines = [f"{name}: the sizes that {ranks} gave do not add up:"]
        elif self.kind == "differs":
            lines = [f"{name}: called by {present}, while {ranks} called something else:"]
            lines.append(f"  {call}")
        elif self.kind == "behind":
            lines = [f"{name}: {call.state} on {present}, while the GPU of {ranks} is behind:"]
        else:
            lines = [f"{name}: {present} {waits} for {ranks}, whose last call is:"]
        for rank in self.ranks:
            last = self.stands.get(rank)
            on_gpu = f", {last.state} on its GPU" if self.kind == "behind" else ""
            none = "no call at all" if rank in self.stands else "no record"
            lines.append(f"  {last}{on_gpu}" if last else f"  rank {rank}  {none}")
        return "\n".join(lines)


def explain(calls: Calls) -> list[Finding]:
    """Why the ranks stand still: the first disagreement of each group, the cause first.

    Nothing is found only when no rank waits: then what stands still is no call of torch's.
    """
    stuck = {rank: call for rank, mine in calls.items() if (call := _stuck(mine))}
    found = [finding for group in _groups(calls) if (finding := _first(calls, group))]
    if cycle := _cycle(calls, stuck):
        first = stuck[cycle[0]]
        stands = {rank: stuck[rank] for rank in cycle}
        return [Finding("cycle", cycle, first, cycle, stands)]
    found += _between_two(calls, stuck)
    # Whoever waits nowhere else is where the waiting begins.
    return sorted(found, key=lambda finding: _elsewhere(finding, stuck)) or _together(calls, stuck)


def _elsewhere(finding: Finding, stuck: Mapping[int, Call]) -> bool:
    """Whether one of those that others wait for waits itself, in another collective."""
    own = finding.stands if finding.kind == "behind" else {}
    return any(rank in stuck and stuck[rank] != own.get(rank) for rank in finding.ranks)


def _stuck(mine: Sequence[Call]) -> Call | None:
    """The oldest call that has not finished: a rank that waits, waits there."""
    return next((call for call in mine if call.waiting), None)


def _stands(mine: Sequence[Call]) -> list[Call]:
    """Return the calls that a rank may be in: those that started, or the oldest with each peer.

    Calls that nccl starts as one have one number. Untimed, no call is known to have started, and
    those with several peers may run side by side.
    """
    waiting = [call for call in mine if call.waiting]
    oldest = {(call.group, call.peer): call for call in reversed(waiting)}.values()
    front = [call for call in waiting if call.state == "started"] or oldest
    numbers = {(call.group, call.peer is None, call.number) for call in front}
    return [c for c in waiting if (c.group, c.peer is None, c.number) in numbers]


def _answer(calls: Calls, call: Call) -> Call | None:
    """Return the recv in which a send's peer is, or the send of a recv's."""
    theirs = _stands(calls.get(call.peer, ())) if call.peer is not None else []
    ends = call.group, call.rank, {"send": "recv", "recv": "send"}.get(call.op)
    return next((c for c in theirs if (c.group, c.peer, c.op) == ends), None)


def _between_two(calls: Calls, stuck: Mapping[int, Call]) -> list[Finding]:
    """Return sends and recvs that the peer does not answer, or answers with another size."""
    found = []
    for call in (c for rank in stuck for c in _stands(calls[rank]) if c.peer is not None):
        answer, peer = _answer(calls, call), call.peer
        if answer is None:
            stands = {r: stuck.get(r) or [None, *calls[r]][-1] for r in {peer} & {*calls}}
            found.append(Finding("missing", (peer,), call, (call.rank,), stands))
        elif call.op == "send" and len({(_count(c.sizes), c.dtype) for c in (call, answer)}) > 1:
            found.append(Finding("differs", (peer,), call, (call.rank,), {peer: answer}))
    return found


def _together(calls: Calls, stuck: Mapping[int, Call]) -> list[Finding]:
    """Return the calls in which some wait, though all ranks with a record have come to them."""
    same: dict[tuple[object, frozenset[int], int], list[Call]] = {}
    for rank, call in sorted(stuck.items()):
        ends = call.members if call.peer is None else (rank, call.peer)
        number = call.number if call.peer is None else 0  # each end of a send counts its own
        same.setdefault((call.group, frozenset(ends), number), []).append(call)
    found = []
    for (_, ends, _), mine in same.items():
        silent, here = tuple(sorted(ends - calls.keys())), tuple(call.rank for call in mine)
        kind = "missing" if silent else "together"
        found.append(Finding(kind, silent, min(mine, key=_far), here, {}))
    return found


def _groups(calls: Calls) -> list[tuple[str, tuple[int, ...]]]:
    return list(dict.fromkeys((c.group, c.members) for mine in calls.values() for c in mine))


def _first(calls: Calls, group: tuple[str, tuple[int, ...]]) -> Finding | None:
    """The first number in a group at which its members part ways."""
    name, members = group
    present = [rank for rank in members if rank in calls]  # the others left no record
    by_number = {
        rank: {c.number: c for c in calls[rank] if (c.group, c.members, c.peer) == (*group, None)}
        for rank in present
    }
    # A record is a ring: its oldest calls may be gone, on one rank sooner than on another.
    oldest = max((min(mine) for mine in by_number.values() if mine), default=1)
    newest = max((max(mine) for mine in by_number.values() if mine), default=0)
    for number in range(oldest, newest + 1):
        here = {rank: mine[number] for rank, mine in by_number.items() if number in mine}
        # Each rank may send others another part: then what goes in is what comes out, over all.
        sides = [(c.sizes, c.out) for c in here.values() if c.op == "all_to_all"]
        sums = {sum(map(_count, side)) for side in zip(*sides, strict=True)}
        unequal = len(sums) > 1 and len(sides) == len(members)
        shapes = {rank: (*_shape(c), unequal and (c.sizes, c.out)) for rank, c in here.items()}
        most, votes = Counter(shapes.values()).most_common(1)[0]
        agree = {rank: call for rank, call in here.items() if shapes[rank] == most}
        others = tuple(rank for rank in here if rank not in agree)
        call = next(iter(agree.values()))
        if unequal and votes <= len(here) / 2:  # all have sizes of their own: it may be any
            return Finding("differs", tuple(here), call, (), dict(here))
        if others:
            return Finding("differs", others, call, tuple(agree), {r: here[r] for r in others})
        missing = tuple(rank for rank in present if rank not in here)
        if missing and any(call.waiting for call in here.values()):
            last = {rank: calls[rank][-1] if calls[rank] else None for rank in missing}
            return Finding("missing", missing, call, tuple(here), last)
        far = {rank: _far(call) for rank, call in here.items()}
        behind = tuple(rank for rank in here if far[rank] < max(far.values()))
        if behind and any(call.waiting for call in here.values()):
            ahead = tuple(rank for rank in here if rank not in behind)
            return Finding("behind", behind, here[ahead[0]], ahead, {r: here[r] for r in behind})
    return None


def _far(call: Call) -> int:
    """How far a GPU has come in a call; with gloo as little as possible on all ranks."""
    return STATES.index(call.state)


def _shape(call: Call) -> tuple[object, ...]:
    """What has to be equal on all ranks of a group."""
    return (call.op, call.sizes, call.dtype) if call.op in _ALIKE else (call.op,)


def _count(shapes: Sequence[Sequence[int]]) -> int:
    return sum(map(math.prod, shapes))


def _cycle(calls: Calls, stuck: Mapping[int, Call]) -> tuple[int, ...]:
    """Ranks that wait for one another in a circle, or nothing."""

    def awaited(rank: int) -> list[int]:
        mine = stuck[rank]
        if mine.peer is not None:
            waits = [c.peer for c in _stands(calls[rank]) if not _answer(calls, c)]
            return [peer for peer in waits if peer in stuck]
        came = {
            other
            for other in mine.members
            for call in calls.get(other, ())
            if (call.group, call.members, call.number, call.peer)
            == (mine.group, mine.members, mine.number, None)
            and _far(call) >= _far(mine)
        }
        return [other for other in mine.members if other not in came and other in stuck]

    for start in stuck:
        path = [start]
        while ahead := awaited(path[-1]):
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
    found = explain(calls)
    print(*found or ["no call is waited for: look with py-spy"], sep="\n")
    if not found or found[0].kind == "together":
        print(_last(calls), end="")
    return 0


def _last(calls: Calls) -> str:
    """Whom the others wait for in a job that is only slow, where nccl has timed it."""
    from .straggler import arrivals  # here: it takes a second, and most hangs need none

    with suppress(ValueError):  # too few calls
        last = max(arrivals(calls), key=lambda arrival: arrival.late)
        if last.timed:
            return f"rank {last.rank} is last, by {1e3 * last.late:.0f} ms (median)\n"
    return ""
