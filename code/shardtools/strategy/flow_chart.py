"""A flow chart over a plan: the technique to try first, and the next ones if it does not suffice.

The chart has eight techniques, from the smallest change to the largest; each layout belongs to one.
The choice is the fastest feasible layout of the first technique that has any, unless it shards
weights (ZeRO-3) and the copies wait for weights longer than they compute. Techniques are ordered by
effort and by traffic: a rule of thumb for links that are much faster inside a node. Compare the
choice with the plan's fastest layout to judge the rule. The last technique is for models that fit
with no other: states move to the host's memory, over the slowest link of all.
"""

from __future__ import annotations

from shardlab.layout import Layout

from .advice import explain_infeasible
from .plan import Candidate, Plan

TECHNIQUES = (
    "data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "recompute", "tensor in the node",
    "pipeline across nodes", "the host's memory",
)  # fmt: skip


def find_technique(layout: Layout) -> str:
    """Return the last technique of the chart that a layout uses."""
    if layout.offload != "none":
        return TECHNIQUES[7]
    if layout.pp > 1:
        return TECHNIQUES[6]
    if layout.tp > 1:
        return TECHNIQUES[5]
    return TECHNIQUES[layout.zero if layout.recompute == "none" else 4]


def fastest_by_technique(plan: Plan) -> dict[str, Candidate]:
    """Return the fastest feasible layout of each technique, in the chart's order.

    The chart ignores context parallelism, unless no layout fits without it.
    """
    best: dict[str, Candidate] = {}
    without_cp = [one for one in plan.feasible if one.layout.cp == 1]
    for candidate in without_cp or plan.feasible:  # the fastest first
        best.setdefault(find_technique(candidate.layout), candidate)
    return {name: best[name] for name in TECHNIQUES if name in best}


def choose_by_chart(plan: Plan) -> Candidate:
    """Return the first technique's layout whose weights arrive in time, or else the first.

    Raises ValueError if nothing fits.
    """
    if not plan.feasible:
        raise ValueError(explain_infeasible(plan))
    fits = list(fastest_by_technique(plan).values())
    return next((one for one in fits if can_hide_gathers(one)), fits[0])


def can_hide_gathers(candidate: Candidate) -> bool:
    """Return True unless ZeRO-3's copies wait longer for weights than they compute."""
    parts = candidate.prediction.seconds
    return candidate.layout.zero < 3 or parts.data <= parts.products + parts.attention
