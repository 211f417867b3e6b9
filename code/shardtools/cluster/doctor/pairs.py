"""Latency and bandwidth between each pair of ranks, and differences of their clocks.

A small message's one-way time is the latency; a large one's bytes over its time beyond the latency
are the bandwidth (Hockney 1994). Large messages grow to some milliseconds; the best try counts.

Pairs come in rounds: in round d rank r is paired with r XOR d, so pairs of a round are disjoint.
With NCCL all of them run at once, as a job loads all GPUs' links at once. NCCL connects a pair at
its first message, and blocks both ends until then; the lower rank of each pair sends first, so that
no cycle of waiting arises. With gloo, whose bytes the hosts' cores move, a host's pairs take turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.measure.count import read_clock
from shardlab.ranks.p2p import get_backend

from .meet import Rendezvous

Pair = tuple[int, int]
WHOLE = 16  # ranks up to which every pair is measured
GOAL = 0.02  # seconds that a large message should take
SMALLEST, LARGEST = 2**16, 2**26  # bytes of a large message
SMALL = 8  # bytes of a small message
TRIES = 4


def rounds(size: int) -> Iterator[list[Pair]]:
    """Yield disjoint pairs, round by round.

    All pairs up to 16 ranks; above, pairs at distances 1 to 7 (a node of eight), 8, 16, 32, and so
    on.
    """
    reach = 1 << (size - 1).bit_length()
    for distance in range(1, reach):
        if size <= WHOLE or distance < 8 or distance.bit_count() == 1:
            pairs = [(r, r ^ distance) for r in range(size) if r < r ^ distance < size]
            if pairs:
                yield pairs


def turns(size: int, hosts: Sequence[str], apart: bool) -> list[list[Pair]]:
    """Return pairs that are measured at the same time; apart: at most one pair on each host."""
    found: list[list[Pair]] = []
    for left in rounds(size):
        while left:
            turn: list[Pair] = []
            busy: set[str | int] = set()
            for pair in left:
                touched = {hosts[rank] for rank in pair} if apart else {*pair}
                if not touched & busy:
                    turn.append(pair)
                    busy |= touched
            found.append(turn)
            left = [pair for pair in left if pair not in turn]
    return found


def measure(
    meeting: Rendezvous, group: dist.ProcessGroup, device: torch.device, hosts: Sequence[str]
) -> list[dict[str, Any]]:
    """Return this rank's links, of which it is the lower end: `pair`, `latency`, `bandwidth`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    apart = device.type == "cpu" or get_backend(device, group) != "nccl"
    found = []
    for turn in turns(size, hosts, apart):
        mine = next((pair for pair in turn if rank in pair), None)
        step = "a message between ranks {} and {}".format(*mine or turn[0])
        if mine:
            meeting.set_step(step)
            link = measured(mine, group, device)
            found += [link] if rank == mine[0] else []
        meeting.set_step(step, waiting=True)
        dist.all_reduce(torch.zeros(1), group=group)  # a barrier on the host before the next turn
    return found


def measured(pair: Pair, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Measure the link between two ranks, on both; the lower rank's values count."""
    first = dist.get_rank(group) == pair[0]
    peer = pair[1] if first else pair[0]
    other = dist.get_global_rank(group, peer)

    def trip(size: int, times: int) -> float:
        """Return the mean seconds of a message, one way, over `times` round trips."""
        tensor = torch.ones(size, dtype=torch.uint8, device=device)
        ways = [ranks.isend, ranks.irecv] if first else [ranks.irecv, ranks.isend]
        begin = read_clock(device)
        for way in ways * times:
            way(tensor, peer, group).wait()
        return (read_clock(device) - begin) / (2 * times)

    trip(SMALL, 1)  # nccl connects here
    times, size = 1, SMALLEST
    latency, bandwidth = math.inf, 0.0
    for _ in range(TRIES):
        small, large = trip(SMALL, times), trip(size, 1)
        latency = min(latency, small)
        # If it takes less than twice the small one's time, subtraction would leave only noise.
        bandwidth = max(bandwidth, size / (large - small if large > 2 * small else large))
        grown = size * max(1.0, GOAL / large)
        if large < 3 * small:  # the time is mostly latency
            grown = max(grown, 4 * size)
        plan = torch.tensor([max(1, min(10, GOAL / small)), min(LARGEST, grown)]).long()
        if first:  # both ends need the same plan
            dist.send(plan, other, group)
        else:
            dist.recv(plan, other, group)
        times, size = plan.tolist()
    return {"pair": list(pair), "latency": latency, "bandwidth": bandwidth}


def clocks(meeting: Rendezvous, group: dist.ProcessGroup, tries: int = 5) -> dict[str, float]:
    """Return the seconds by which this rank's clock is ahead of rank 0's, and their error.

    Rank 0 sends its time, which it reads between question and arrival, to one rank after another:
    half of the shortest round trip is its error (Cristian 1989).
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    told, best = torch.zeros(1, dtype=torch.float64), (0.0, 0.0 if rank == 0 else math.inf)
    for peer in range(1, size):
        meeting.set_step(f"the clock of rank {peer}", waiting=rank not in (0, peer))
        if rank not in (0, peer):
            continue
        other = dist.get_global_rank(group, peer if rank == 0 else 0)
        for _ in range(tries):
            if rank == 0:
                dist.recv(told, other, group)
                dist.send(told.fill_(time.time()), other, group)
                continue
            asked = time.time()
            dist.send(told, other, group)
            dist.recv(told, other, group)
            half = (time.time() - asked) / 2
            best = min(best, (asked + half - told.item(), half), key=lambda one: one[1])
    return {"ahead": best[0], "within": best[1]}
