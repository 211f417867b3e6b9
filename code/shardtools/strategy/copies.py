"""What the copies of a model wait for in a step: gradients and weights on their way between them.

Letters as in `cost`. Rates and machines are those of `core`, which has the rest of a step.
"""

from __future__ import annotations

from math import ceil

from shardlab.layout import Stage

from .job import Job
from .rates import Values


def seconds(job: Job, rates: Values, stage: Stage, busy: float, first: float) -> float:
    """Seconds in which the copies wait for gradients and weights, and tied ends for each other.

    busy: the step's work; first: seconds of a micro-batch's forward pass.
    """
    layout = job.layout
    waits = _zero(job, rates, stage, busy, first) if layout.shards > 1 else 0.0
    # Sums, of which backward hides a part: two sends of each byte.
    exposed = 2 * job.profile.wire.gradient * rates.exposed
    if layout.replicas > 1:  # groups add up the shards of their gradients, each rank with its like
        part = job.held(stage).shard(layout) * (layout.replicas - 1) / layout.replicas
        waits += exposed * part / rate(job, rates, layout.replicas, layout.shards)
    if job.model.tied and layout.pp > 1:
        ends = job.model.vocab * job.model.hidden / layout.tp
        both = 2 * job.profile.wire.gradient * ends
        waits += both / (rates.network * job.machine.between)
    return waits


def _zero(job: Job, rates: Values, stage: Stage, busy: float, first: float) -> float:
    """Seconds in which a group of copies waits, by the stage of ZeRO.

    Of unsharded gradients backward hides a part, and of scattered ones the same; weights of ZeRO-1
    and 2 are gathered when the step is over, or ahead of each layer of the next forward pass. That,
    and what is sent for each micro-batch, from ZeRO-2 on, or 3 where there are stages, can hide
    behind the work, but for a part, and for what takes longer.
    """
    layout, wire, m = job.layout, job.profile.wire, job.layout.microbatches
    once = _once(job, rates, stage)
    far = ceil(layout.shards / _near(job)) - 1  # nodes that each gather goes on to
    each = job.model.layers / layout.pp * rates.hop * far  # of all layers, beside the bytes
    after = wire.weight * once + (each if layout.zero < 3 else 0.0)
    if job.profile.ahead:
        after = max(rates.gathers * after, after - first)
    if layout.zero == 0:
        return _exposed(rates, 2 * wire.gradient * once, busy)
    if layout.zero == 1 or (layout.zero == 2 and layout.pp > 1):  # stages add up first
        sums = 2 * once if job.profile.reduced else _exposed(rates, once, busy / wire.gradient)
        return wire.gradient * sums + after
    # For each micro-batch; ZeRO-3 gathers weights for forward and for backward, ZeRO-2 once a step.
    gathers = 2 if layout.zero == 3 else 0
    sent = m * (wire.gradient + gathers * wire.weight) * once
    sent += m * (1 + gathers) * each
    waits = max(rates.gathers * sent, sent - busy)
    return waits if gathers else waits + after


def _exposed(rates: Values, taken: float, busy: float) -> float:
    """Seconds of a sum of gradients that backward does not hide: no more than it has."""
    return max(rates.exposed * taken, taken - busy)


def _once(job: Job, rates: Values, stage: Stage) -> float:
    """Seconds in which a byte of each parameter is scattered, or gathered, in a group of copies."""
    group, ep, held = job.layout.shards, job.layout.ep, job.held(stage)
    own = held.experts
    taken = (held.all - own) * (group - 1) / group / rate(job, rates, group)
    if own and (same := job.layout.alike) > 1:  # the ranks that have the same experts
        apart = max(1, ep * job.layout.cut // job.layout.tp)
        taken += own * (same - 1) / same / rate(job, rates, same, apart)
    return taken


def rate(job: Job, rates: Values, ranks: int, apart: int = 1) -> float:
    """Bytes per second between `ranks` copies, each `apart` copies from the next.

    Copies of one node share its cards: of g of them, each carries a g-th.
    """
    machine = job.machine
    here = min(ranks, _near(job, apart))
    rate = rates.node * machine.inside
    if ranks > here:
        rate = min(rate, rates.network * machine.between * here)
    return rate


def _near(job: Job, apart: int = 1) -> int:
    """Copies of a node, of those that are `apart` copies from each other."""
    return max(1, job.machine.per_node // (job.layout.tp * apart))
