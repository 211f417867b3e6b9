"""A check of a lesson's claims about measured times, which may fail on a busy machine.

    check_timing(ratio < 0.95, "with overlap a step takes less than 95 % of the time")

Lessons assert equalities, which hold on every machine. A claim about time needs free cores: if it
fails, `check_timing` prints one line with the claim and the machine's load, and the lesson goes on.
A build runs the cell again instead, at most three times, and accepts the line at last only if other
programs keep the machine busy (`shardcourse.build.kernel`).
"""

from __future__ import annotations

import time

import psutil

UNSEEN_PREFIX = "Not seen in this run: "
BUSY_TEXT = "too busy to judge"
_LOOPS = 5_000_000
_LOOP_SECONDS = 0.1  # time of _LOOPS on an idle core of an AMD EPYC server, with Python 3.11
_BUSY_LOAD = 0.15  # load from which a machine is busy; an idle machine's services take less


def check_timing(holds: bool, claim: str) -> None:
    """Unless `holds`, print that `claim` was not seen, and the machine's load."""
    if not holds:
        print(format_unseen_claim(claim))


def format_unseen_claim(claim: str) -> str:
    """Return the line for a claim that was not seen, with the machine's load."""
    load = measure_other_load()
    if load >= _BUSY_LOAD:
        reason = f"this machine is {BUSY_TEXT}: other programs use {load:.0%} of its cores"
    else:
        reason = f"other programs use {load:.0%} of this machine's cores; it may be of another kind"
    return f"{UNSEEN_PREFIX}{claim} ({reason}). Run it again when nothing else runs."


def measure_other_load(seconds: float = 0.4) -> float:
    """Return the share of this machine's cores that all programs use now, from 0 to 1."""
    return psutil.cpu_percent(seconds) / 100


def measure_slowdown() -> float:
    """Return this machine's present slowdown factor over an idle reference core, at least 1.

    Both a slow processor and other work increase it, as both matter for a limit in seconds.
    """
    begin = time.monotonic()
    for _ in range(_LOOPS):
        pass
    return max(1.0, (time.monotonic() - begin) / _LOOP_SECONDS)
