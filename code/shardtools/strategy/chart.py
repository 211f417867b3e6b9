"""A flow chart over a plan: the technique to try first, and the next ones if it does not suffice.

The chart has eight rungs, from the smallest change to the largest; each layout stands on one. From
a plan's feasible layouts it takes the fastest of the first rung that has any, unless that rung
shards weights (ZeRO-3) and the copies wait for weights longer than they compute. Rungs are ordered
by effort and by traffic: a rule of thumb for links that are much faster inside a node. Compare the
choice with the plan's fastest layout to judge the rule. The last rung is for models that fit on no
other: states move to the host's memory, over the slowest link of all.
"""

from __future__ import annotations

from shardlab.layout import Layout

from .plan import Plan, Planned, short

RUNGS = (
    "data parallel",
    "ZeRO-1",
    "ZeRO-2",
    "ZeRO-3",
    "recompute",
    "tensor in the node",
    "pipeline across nodes",
    "the host's memory",
)


def rung(layout: Layout) -> str:
    """Return the rung of a layout: that of the last technique that it adds."""
    if layout.offload != "none":
        return RUNGS[7]
    if layout.pp > 1:
        return RUNGS[6]
    if layout.tp > 1:
        return RUNGS[5]
    return RUNGS[layout.zero if layout.recompute == "none" else 4]


def rungs(found: Plan) -> dict[str, Planned]:
    """Return the fastest feasible layout of each rung, in the chart's order.

    The chart ignores context parallelism, unless no layout fits without it.
    """
    best: dict[str, Planned] = {}
    alone = [planned for planned in found.fits if planned.layout.cp == 1]
    for planned in alone or found.fits:  # the fastest first
        best.setdefault(rung(planned.layout), planned)
    return {name: best[name] for name in RUNGS if name in best}


def choose(found: Plan) -> Planned:
    """Return the first rung's layout whose weights arrive in time, or else the first that fits.

    Raises ValueError if nothing fits: it says what is short, and what would make it fit.
    """
    if not found.fits:
        raise ValueError(short(found))
    fits = list(rungs(found).values())
    return next((planned for planned in fits if keeps_up(planned)), fits[0])


def keeps_up(planned: Planned) -> bool:
    """Return True unless ZeRO-3's copies wait longer for weights than they compute."""
    parts = planned.prediction.seconds
    return planned.layout.zero < 3 or parts.data <= parts.products + parts.attention
