"""Exposed data-parallel traffic of a step: gradients and weights sent between model copies.

Symbols as in `cost`. Rates and machines as in `core`, which predicts the rest of a step.
"""

from __future__ import annotations

from math import ceil

from shardlab.layout import Stage

from .job import Job
from .rates import Values


def seconds(job: Job, rates: Values, stage: Stage, busy: float, first: float) -> float:
    """Return the seconds in which copies wait for gradients and weights, and tied embeddings sync.

    busy: seconds of the step's compute; first: seconds of a micro-batch's forward pass.
    """
    layout = job.layout
    waits = _zero(job, rates, stage, busy, first) if layout.shards > 1 else 0.0
    # All-reduces, which send each byte twice, and of which backward hides a part.
    exposed = 2 * job.profile.wire.gradient * rates.exposed
    if layout.replicas > 1:  # HSDP: each rank all-reduces its gradient shard with other groups
        part = job.held(stage).shard(layout) * (layout.replicas - 1) / layout.replicas
        waits += exposed * part / rate(job, rates, layout.replicas, layout.shards)
    if job.model.tied and layout.pp > 1:
        ends = job.model.vocab * job.model.hidden / layout.tp
        both = 2 * job.profile.wire.gradient * ends
        waits += both / (rates.network * job.machine.between)
    return waits


def _zero(job: Job, rates: Values, stage: Stage, busy: float, first: float) -> float:
    """Return the exposed seconds of one sharding group's traffic, by the stage of ZeRO.

    Backward hides a part of the all-reduce (stage 0) and of ZeRO-1's reduce-scatter. ZeRO-1 and 2
    gather weights after the step, or layer by layer in the next forward pass. Compute hides this
    gather, and what is sent per micro-batch, except for a share and for any excess over compute.
    """
    layout, wire, m = job.layout, job.profile.wire, job.layout.microbatches
    once = _once(job, rates, stage)
    far = ceil(layout.shards / _near(job)) - 1  # further nodes that each gather reaches
    each = job.model.layers / layout.pp * rates.hop * far  # latency of one gather of all layers
    after = wire.weight * once + (each if layout.zero < 3 else 0.0)
    if job.profile.ahead:
        after = max(rates.gathers * after, after - first)
    if layout.zero == 0:
        return _exposed(rates, 2 * wire.gradient * once, busy)
    if layout.zero == 1 or (layout.zero == 2 and layout.pp > 1):  # a pipeline accumulates first
        sums = 2 * once if job.profile.reduced else _exposed(rates, once, busy / wire.gradient)
        return wire.gradient * sums + after
    # Per micro-batch: ZeRO-3 gathers weights for forward and for backward, ZeRO-2 once a step.
    gathers = 2 if layout.zero == 3 else 0
    sent = m * (wire.gradient + gathers * wire.weight) * once
    sent += m * (1 + gathers) * each
    waits = max(rates.gathers * sent, sent - busy)
    return waits if gathers else waits + after


def _exposed(rates: Values, taken: float, busy: float) -> float:
    """Return the seconds of a gradient reduction that `busy` seconds of compute do not hide."""
    return max(rates.exposed * taken, taken - busy)


def _once(job: Job, rates: Values, stage: Stage) -> float:
    """Return the seconds to scatter or gather one byte per parameter in a sharding group."""
    group, ep, held = job.layout.shards, job.layout.ep, job.held(stage)
    own = held.experts
    taken = (held.all - own) * (group - 1) / group / rate(job, rates, group)
    if own and (same := job.layout.alike) > 1:  # ranks that hold the same experts
        apart = max(1, ep * job.layout.cut // job.layout.tp)
        taken += own * (same - 1) / same / rate(job, rates, same, apart)
    return taken


def rate(job: Job, rates: Values, ranks: int, apart: int = 1) -> float:
    """Return the bytes per second between `ranks` copies, each `apart` copies from the next.

    Copies on one node share the node's network cards: each of g copies sends a g-th.
    """
    machine = job.machine
    here = min(ranks, _near(job, apart))
    rate = rates.node * machine.inside
    if ranks > here:
        rate = min(rate, rates.network * machine.between * here)
    return rate


def _near(job: Job, apart: int = 1) -> int:
    """Return how many of the copies that are `apart` copies from each other share a node."""
    return max(1, job.machine.per_node // (job.layout.tp * apart))
