"""The straggler: the rank for which all others wait, in every step.

Step times do not show it: each step ends with a collective, which ends on all ranks at once, so
the slow rank's step is as long as that of all others. The time at which each rank *enters* the
first collective of a step shows it: the slow rank enters last, and waits for no other.

    rows = measure_delays({rank: flight.parse_calls(r) for rank, r in enumerate(records)})

The times come from the flight recorder, so a job needs no change. They are of two kinds:

- The time when the host queued the call. With gloo that is when the rank entered it. With NCCL the
  host runs ahead of its GPU, so these times show slow hosts, but hide a throttled GPU. They compare
  clocks: on one machine these agree; between machines NTP leaves some milliseconds.
- The call's duration on the GPU, with TORCH_NCCL_ENABLE_TIMING=1. All ranks end together, so the
  rank with the shortest collectives entered last; no clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from shardlab.common import show

from .flight import Call

MIN_COLLECTIVES = 30  # for a median on a busy machine


@dataclass(frozen=True)
class RankDelays:
    """The delays of one rank at the collectives of a group."""

    rank: int
    median_delay: float  # median seconds after the first rank
    share_last: float  # share of the collectives that this rank entered last
    delays: tuple[float, ...]  # seconds after the first rank, for each collective


def measure_delays(calls: Mapping[int, Sequence[Call]]) -> list[RankDelays]:
    """Return each rank's delays at collectives that all ranks call, in rank order.

    Uses the collectives of groups of all ranks; only those that every rank has timed, if any.
    Raises ValueError with fewer than MIN_COLLECTIVES.
    """
    everyone = tuple(sorted(calls))
    by_number: dict[tuple[str, int], dict[int, Call]] = {}
    for rank, mine in calls.items():
        for call in mine:
            if call.members == everyone:
                by_number.setdefault((call.group, call.number), {})[rank] = call
    complete = [step for step in by_number.values() if len(step) == len(everyone)]
    timed = [step for step in complete if all(c.duration is not None for c in step.values())]
    # Timed collectives end together: the shorter a rank's call, the later the rank entered.
    steps = [{r: -c.duration for r, c in step.items()} for step in timed]
    steps = steps or [{r: c.created for r, c in step.items()} for step in complete]
    if len(steps) < MIN_COLLECTIVES:
        words = f"must have {MIN_COLLECTIVES} or more steps that all ranks recorded"
        raise ValueError(f"calls: {words}, not {len(steps)}")
    found = []
    for rank in everyone:
        delays = tuple(step[rank] - min(step.values()) for step in steps)
        share_last = sum(step[rank] == max(step.values()) for step in steps) / len(steps)
        found.append(RankDelays(rank, median(delays), share_last, delays))
    return found


def draw_delays(ranks: Sequence[RankDelays], durations: Mapping[int, Sequence[float]]) -> Figure:
    """Draw the ranks' step times, which agree, above their delays, which do not.

    durations: seconds of each step, by rank, as the rank measured them.
    """
    show.set_style()
    figure, panels = plt.subplots(2, 1, figsize=(6.2, 4.4), sharex=True)
    colors = show.RANK_COLORS
    for entry in ranks:
        color = colors[entry.rank % len(colors)]
        mine = [1e3 * seconds for seconds in durations[entry.rank]]
        panels[0].plot(mine, color=color, lw=1.4)
        delays = [1e3 * seconds for seconds in entry.delays]
        panels[1].plot(delays, "o", color=color, ms=3.5)
        panels[1].axhline(1e3 * entry.median_delay, color=color, lw=1, alpha=0.7)
    top = 1.1 * max(np.percentile([1e3 * s for s in mine], 95) for mine in durations.values())
    panels[0].set_ylim(0, 1.15 * top)
    middle = [1e3 * median(mine) for mine in durations.values()]
    title = f"duration of each step (ms): medians {min(middle):.0f} to {max(middle):.0f}"
    panels[0].set_title(title, loc="left")
    slowest = max(ranks, key=lambda entry: entry.median_delay)
    panels[1].set_ylim(bottom=0, top=2.2e3 * slowest.median_delay)
    title = f"first message of a step, after the first rank (ms): rank {slowest.rank} is last"
    panels[1].set_title(title, loc="left")
    panels[1].set_xlabel("step")
    for axes in panels:
        axes.title.set_fontsize(10.5)
    figure.tight_layout()
    return figure
