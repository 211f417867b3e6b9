"""Latency and bandwidth between each pair of ranks, and differences of their clocks.

The latency is the one-way time of a small message; the bandwidth is the bytes of a large message
over its time beyond the latency (Hockney 1994), the best of several tries.

In round d rank r is paired with rank r XOR d, so the pairs of a round are disjoint. With NCCL they
run at the same time, as a job uses all links at the same time. NCCL connects a pair at its first
message and blocks both ends until then; the lower rank of each pair sends first, so that ranks do
not wait in a cycle. With gloo the cores of a host move the bytes, so the host's pairs take turns.
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

from .rendezvous import Rendezvous

Pair = tuple[int, int]
MAX_ALL_PAIRS_RANKS = 16  # with more ranks, only some pairs are measured
LARGE_SECONDS = 0.02  # that a large message should take
MIN_LARGE_BYTES, MAX_LARGE_BYTES = 2**16, 2**26
SMALL_BYTES = 8
NUM_TRIES = 4


def generate_rounds(size: int) -> Iterator[list[Pair]]:
    """Yield disjoint pairs, round by round.

    All pairs up to 16 ranks; above, only distances 1 to 7 (a node of eight), 8, 16, 32, …
    """
    reach = 1 << (size - 1).bit_length()
    for distance in range(1, reach):
        if size <= MAX_ALL_PAIRS_RANKS or distance < 8 or distance.bit_count() == 1:
            pairs = [(r, r ^ distance) for r in range(size) if r < r ^ distance < size]
            if pairs:
                yield pairs


def schedule_turns(size: int, hosts: Sequence[str], one_per_host: bool) -> list[list[Pair]]:
    """Return pairs to measure at the same time. one_per_host: at most one pair on each host."""
    found: list[list[Pair]] = []
    for left in generate_rounds(size):
        while left:
            turn: list[Pair] = []
            busy: set[str | int] = set()
            for pair in left:
                touched = {hosts[rank] for rank in pair} if one_per_host else {*pair}
                if not touched & busy:
                    turn.append(pair)
                    busy |= touched
            found.append(turn)
            left = [pair for pair in left if pair not in turn]
    return found


def measure_links(
    rendezvous: Rendezvous, group: dist.ProcessGroup, device: torch.device, hosts: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the `pair`, `latency` and `bandwidth` of each link whose lower rank is this rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    one_per_host = device.type == "cpu" or get_backend(device, group) != "nccl"
    found = []
    for turn in schedule_turns(size, hosts, one_per_host):
        mine = next((pair for pair in turn if rank in pair), None)
        step = "a message between ranks {} and {}".format(*mine or turn[0])
        if mine:
            rendezvous.set_step(step)
            link = measure_link(mine, group, device)
            found += [link] if rank == mine[0] else []
        rendezvous.set_step(step, waiting=True)
        dist.all_reduce(torch.zeros(1), group=group)  # a barrier on the host before the next turn
    return found


def measure_link(pair: Pair, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Measure the link between two ranks, on both; the lower rank's values count."""
    first = dist.get_rank(group) == pair[0]
    peer = pair[1] if first else pair[0]
    other = dist.get_global_rank(group, peer)

    def measure_one_way(size: int, times: int) -> float:
        """Return the mean seconds of a message, one way, over `times` round trips."""
        tensor = torch.ones(size, dtype=torch.uint8, device=device)
        sends = [ranks.isend, ranks.irecv] if first else [ranks.irecv, ranks.isend]
        begin = read_clock(device)
        for send in sends * times:
            send(tensor, peer, group).wait()
        return (read_clock(device) - begin) / (2 * times)

    measure_one_way(SMALL_BYTES, 1)  # nccl connects here
    times, size = 1, MIN_LARGE_BYTES
    latency, bandwidth = math.inf, 0.0
    for _ in range(NUM_TRIES):
        small, large = measure_one_way(SMALL_BYTES, times), measure_one_way(size, 1)
        latency = min(latency, small)
        # If the large message takes less than twice as long, subtraction would leave only noise.
        bandwidth = max(bandwidth, size / (large - small if large > 2 * small else large))
        grown = size * max(1.0, LARGE_SECONDS / large)
        if large < 3 * small:  # the time is mostly latency
            grown = max(grown, 4 * size)
        repeats = max(1, min(10, LARGE_SECONDS / small))
        plan = torch.tensor([repeats, min(MAX_LARGE_BYTES, grown)]).long()
        if first:  # both ends need the same plan
            dist.send(plan, other, group)
        else:
            dist.recv(plan, other, group)
        times, size = plan.tolist()
    return {"pair": list(pair), "latency": latency, "bandwidth": bandwidth}


def measure_clock_offset(
    rendezvous: Rendezvous, group: dist.ProcessGroup, tries: int = 5
) -> dict[str, float]:
    """Return the seconds by which this rank's clock is ahead of rank 0's, and their error.

    One rank after another asks rank 0 for its time; the error is half of the shortest round trip
    (Cristian 1989).
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    remote_time, best = torch.zeros(1, dtype=torch.float64), (0.0, 0.0 if rank == 0 else math.inf)
    for peer in range(1, size):
        rendezvous.set_step(f"the clock of rank {peer}", waiting=rank not in (0, peer))
        if rank not in (0, peer):
            continue
        other = dist.get_global_rank(group, peer if rank == 0 else 0)
        for _ in range(tries):
            if rank == 0:
                dist.recv(remote_time, other, group)
                dist.send(remote_time.fill_(time.time()), other, group)
                continue
            asked = time.time()
            dist.send(remote_time, other, group)
            dist.recv(remote_time, other, group)
            half_trip = (time.time() - asked) / 2
            offset = asked + half_trip - remote_time.item()
            best = min(best, (offset, half_trip), key=lambda one: one[1])
    return {"ahead": best[0], "within": best[1]}
