"""The flow chart: what to try first, and what next when it does not do.

Eight rungs, from the least that can be changed to the most; each layout stands on one of them. The
chart is a way to read a plan: of the layouts that fit, it takes the fastest of the first rung that
has one, unless that rung shares weights (ZeRO-3) and the copies wait for them longer than they
compute. The order is that of effort and of traffic: a rule of thumb for links that are much faster
inside of a node. The plan's own first says how good a one. The last rung is for what fits on none:
its states go to the host's memory, over a link that is slower than all others.
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
    """Where a layout stands: on the rung of the last that it adds."""
    if layout.offload != "none":
        return RUNGS[7]
    if layout.pp > 1:
        return RUNGS[6]
    if layout.tp > 1:
        return RUNGS[5]
    return RUNGS[layout.zero if layout.recompute == "none" else 4]


def rungs(found: Plan) -> dict[str, Planned]:
    """The fastest layout of each rung that has one that fits, in the chart's order.

    The chart knows no context ranks: those who have them stand in it where nothing else fits.
    """
    best: dict[str, Planned] = {}
    alone = [planned for planned in found.fits if planned.layout.cp == 1]
    for planned in alone or found.fits:  # the fastest first
        best.setdefault(rung(planned.layout), planned)
    return {name: best[name] for name in RUNGS if name in best}


def choose(found: Plan) -> Planned:
    """The first rung's layout whose weights do not come too late, or else the first that fits.

    Raises ValueError where nothing fits: what is short, and what would make it fit.
    """
    if not found.fits:
        raise ValueError(short(found))
    fits = list(rungs(found).values())
    return next((planned for planned in fits if keeps_up(planned)), fits[0])


def keeps_up(planned: Planned) -> bool:
    """Whether the wire does, where weights travel: copies wait no longer than they compute."""
    parts = planned.prediction.seconds
    return planned.layout.zero < 3 or parts.data <= parts.products + parts.attention
