"""What a lesson claims of times that it has measured: on a busy machine it may not show.

    timed(ratio < 0.95, "with overlap a step takes less than 95 % of the time")

Equality is asserted, and holds on every machine. A claim about time needs free cores: where it does
not hold, one line says what was expected and how busy the machine is, and the lesson goes on. A
build does not: it runs the cell again, three times at most, and in the end takes the line only from
a machine that other work keeps busy (`shardcourse.build.kernel`).
"""

from __future__ import annotations

import time

import psutil

UNSEEN = "Not seen in this run: "  # how the line begins
BUSY = "too busy to judge"
_LOOPS = 5_000_000
_LOOP_SECONDS = 0.1  # so many took on a quiet core of an AMD EPYC server, with Python 3.11
_FRACTION = 0.15  # of the cores, with others: below it, a quiet machine's own services


def timed(holds: bool, claim: str) -> bool:
    """Return `holds`; where it is False, print the line that says so of `claim`."""
    if not holds:
        print(unseen(claim))
    return bool(holds)


def unseen(claim: str) -> str:
    """The line: what was not seen, and whether this machine can tell."""
    fraction = others()
    if fraction >= _FRACTION:
        why = f"this machine is {BUSY}, other work takes {fraction:.0%} of its cores"
    else:
        why = f"other work takes {fraction:.0%} of this machine's cores, so it may be another kind"
    return f"{UNSEEN}{claim} ({why}). Run it again when nothing else runs."


def others(seconds: float = 0.4) -> float:
    """The share of this machine's cores that other work takes just now, from 0 to 1."""
    return psutil.cpu_percent(seconds) / 100


def slowdown() -> float:
    """Return how many times as long as on a quiet core a computation takes here now, at least 1.

    Both a slow processor and other work count, as both do for a limit in seconds.
    """
    begin = time.monotonic()
    for _ in range(_LOOPS):
        pass
    return max(1.0, (time.monotonic() - begin) / _LOOP_SECONDS)
