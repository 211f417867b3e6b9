"""How often to save: too often costs saving time, too seldom costs work done twice.

Young: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications
of the ACM 17(9), 1974. Daly: J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", Future Generation Computer Systems 22(3), 2006. Seconds throughout.
"""

from __future__ import annotations

import math
import random

from shardlab.common.arguments import check_number


def best_interval(save: float, mtbf: float) -> float:
    """Seconds of training between two saves at which the least time is lost: sqrt(2 save mtbf).

    save: seconds for which one save holds training up. mtbf: mean seconds between two failures of
    the whole job, far longer than `save`. Young's result, and the first term of Daly's.
    """
    check_number(save=save, mtbf=mtbf)
    return math.sqrt(2 * save * mtbf)


def lost_fraction(interval: float, save: float, mtbf: float, restart: float = 0.0) -> float:
    """The fraction of all time that saving, work done twice and restarts take: 0 to 1.

    Exact for failures that strike at any moment alike, also during a save or a restart (Daly:
    the expected time for `interval` seconds of work is mtbf e^(restart/mtbf)
    (e^((interval + save)/mtbf) - 1)). restart: seconds from a failure to the first new step.
    """
    expected = mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf)
    return 1 - interval / expected


def simulated_lost_fraction(
    interval: float, save: float, mtbf: float, restart: float = 0.0
) -> float:
    """The same fraction, of a job that is played through until it has failed 20,000 times."""
    dice = random.Random(0)
    spent = work = 0.0
    for _ in range(20_000):
        alive = dice.expovariate(1 / mtbf)  # from one failure to the next
        saves = max(0.0, alive - restart) // (interval + save)  # complete ones: the rest is lost
        spent += alive
        work += saves * interval
    return 1 - work / spent
