"""Exposed data-parallel traffic of a step: gradients and weights sent between model copies.

Symbols as in `cost`. Rates and machines as in `core`, which predicts the rest of a step.
"""

from __future__ import annotations

from math import ceil

from shardlab.layout import Stage

from .job import Job
from .rates import RateValues


def data_parallel_seconds(
    job: Job, rates: RateValues, stage: Stage, compute: float, forward: float
) -> float:
    """Return the seconds in which copies wait for gradients and weights, and tied embeddings sync.

    compute: seconds of the step's compute; forward: seconds of a micro-batch's forward pass.
    """
    layout = job.layout
    seconds = _zero_seconds(job, rates, stage, compute, forward) if layout.zero_degree > 1 else 0.0
    # All-reduces, which send each byte twice, and of which backward hides a part.
    exposed = 2 * job.profile.wire_bytes.gradient * rates.exposed_reduce
    if layout.replicas > 1:  # HSDP: each rank all-reduces its gradient shard with other groups
        sharded = job.count_parameters(stage).count_sharded(layout)
        part = sharded * (layout.replicas - 1) / layout.replicas
        seconds += exposed * part / link_rate(job, rates, layout.replicas, layout.zero_degree)
    if job.model.tied and layout.pp > 1:
        ends = job.model.vocab * job.model.hidden / layout.tp
        both = 2 * job.profile.wire_bytes.gradient * ends
        seconds += both / (rates.network * job.machine.network_bandwidth)
    return seconds


def _zero_seconds(
    job: Job, rates: RateValues, stage: Stage, compute: float, forward: float
) -> float:
    """Return the exposed seconds of one sharding group's traffic, by the stage of ZeRO.

    Backward hides a part of the all-reduce (stage 0) and of ZeRO-1's reduce-scatter. ZeRO-1 and 2
    gather weights after the step, or layer by layer in the next forward pass. Compute hides this
    gather, and the traffic of each micro-batch, except for a share and for any excess over compute.
    """
    layout, wire, m = job.layout, job.profile.wire_bytes, job.layout.microbatches
    once = _seconds_per_byte(job, rates, stage)
    hops = ceil(layout.zero_degree / _replicas_per_node(job)) - 1  # further nodes of each gather
    # Latency of one gather of all layers.
    each = job.model.layers / layout.pp * rates.gather_latency * hops
    after = wire.weight * once + (each if layout.zero < 3 else 0.0)
    if job.profile.prefetches_weights:
        after = max(rates.exposed_gathers * after, after - forward)
    if layout.zero == 0:
        return _exposed_seconds(rates, 2 * wire.gradient * once, compute)
    if layout.zero == 1 or (layout.zero == 2 and layout.pp > 1):  # a pipeline accumulates first
        reduced = _exposed_seconds(rates, once, compute / wire.gradient)
        return wire.gradient * (2 * once if job.profile.all_reduces_gradients else reduced) + after
    # Per micro-batch: ZeRO-3 gathers weights for forward and for backward, ZeRO-2 once a step.
    gathers = 2 if layout.zero == 3 else 0
    sent = m * (wire.gradient + gathers * wire.weight) * once
    sent += m * (1 + gathers) * each
    waits = max(rates.exposed_gathers * sent, sent - compute)
    return waits if gathers else waits + after


def _exposed_seconds(rates: RateValues, taken: float, compute: float) -> float:
    return max(rates.exposed_reduce * taken, taken - compute)


def _seconds_per_byte(job: Job, rates: RateValues, stage: Stage) -> float:
    """Return the seconds to scatter or gather one byte per parameter in a sharding group."""
    group, ep, held = job.layout.zero_degree, job.layout.ep, job.count_parameters(stage)
    own = held.experts
    taken = (held.total - own) * (group - 1) / group / link_rate(job, rates, group)
    if own and (same := job.layout.expert_zero_degree) > 1:  # ranks that hold the same experts
        stride = max(1, ep * job.layout.expert_tp // job.layout.tp)
        taken += own * (same - 1) / same / link_rate(job, rates, same, stride)
    return taken


def link_rate(job: Job, rates: RateValues, ranks: int, stride: int = 1) -> float:
    """Return the bytes per second between `ranks` copies, each `stride` copies from the next.

    Copies on one node share the node's network cards: each of g copies sends a g-th.
    """
    machine = job.machine
    here = min(ranks, _replicas_per_node(job, stride))
    rate = rates.node * machine.node_bandwidth
    if ranks > here:
        rate = min(rate, rates.network * machine.network_bandwidth * here)
    return rate


def _replicas_per_node(job: Job, stride: int = 1) -> int:
    """Return how many of the copies that are `stride` copies from each other share a node."""
    return max(1, job.machine.gpus_per_node // (job.layout.tp * stride))
