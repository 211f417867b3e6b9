"""The best interval between saves: frequent saves cost time, rare saves cost repeated work.

Young: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications
of the ACM 17(9), 1974. Daly: J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", Future Generation Computer Systems 22(3), 2006. Seconds throughout.
"""

from __future__ import annotations

import math
import random

from shardlab.common.arguments import check_number


def best_interval(save: float, mtbf: float) -> float:
    """Return the seconds between two saves that minimize the time lost: sqrt(2 save mtbf).

    save: seconds for which one save blocks training. mtbf: mean seconds between two failures of
    the whole job, much longer than `save`. This is Young's result, and the first term of Daly's.
    """
    check_number(save=save, mtbf=mtbf)
    return math.sqrt(2 * save * mtbf)


def lost_fraction(interval: float, save: float, mtbf: float, restart: float = 0.0) -> float:
    """Return the fraction of all time that saves, repeated work and restarts take: 0 to 1.

    Exact for failures at a constant rate, also during a save or a restart (Daly: the expected
    time for `interval` seconds of work is mtbf e^(restart/mtbf)
    (e^((interval + save)/mtbf) - 1)). restart: seconds from a failure to the first new step.
    """
    expected = mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf)
    return 1 - interval / expected


def simulated_lost_fraction(
    interval: float, save: float, mtbf: float, restart: float = 0.0
) -> float:
    """Simulate a job until its 20,000th failure; return the same fraction as `lost_fraction`."""
    rng = random.Random(0)
    spent = work = 0.0
    for _ in range(20_000):
        alive = rng.expovariate(1 / mtbf)  # seconds from one failure to the next
        saves = max(0.0, alive - restart) // (interval + save)  # later work is lost
        spent += alive
        work += saves * interval
    return 1 - work / spent
