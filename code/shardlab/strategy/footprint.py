"""How much memory a stage takes, part by part: what is allocated, and what is reserved with it.

An allocator reserves more than a program holds: blocks do not fit one into another, and a buffer
that another stream still reads comes back late. Tools report the reserved bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp

from shardlab.layout import Stage
from shardlab.layout.core import computed_again
from shardlab.memory import in_flight
from shardlab.memory.in_flight import deferred

from .job import Job, parameters, sharded
from .rates import Values

GIB = 2**30


@dataclass(frozen=True)
class Bytes:
    """Parts of what one rank of a stage reserves, which add up to `reserved`."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # kept for backward, with all micro-batches in flight
    logits: float  # and what computes the loss
    buffers: float  # of gradients and weights on their way
    fragments: float  # what the allocator loses between activations
    late: float  # buffers of the tensor group's collectives that come back late
    fixed: float

    @property
    def allocated(self) -> float:
        """Bytes in use at the fullest moment."""
        return self.reserved - self.fragments - self.late - self.fixed

    @property
    def reserved(self) -> float:
        """Bytes that the allocator has taken."""
        return sum(vars(self).values())


def footprint(job: Job, rates: Values, stage: int = 0) -> Bytes:
    """What a rank of `stage` reserves, counted from 0.

    Raises ValueError for layers that the stages cannot share, and for a stage that is not there.
    """
    layout, profile, config = job.layout, job.profile, job.config
    if isinstance(stage, bool) or stage not in range(layout.pp):
        raise ValueError(f"stage={stage!r}: allowed are 0 to {layout.pp - 1}")
    here = layout.parts(config)[stage]
    held, part, zero = parameters(job, here), sharded(job, here), layout.zero
    weights = profile.weight * (part if zero == 3 else held)
    gradients = profile.gradient * (part if zero >= 2 else held)
    optimizer = profile.optimizer * (part if zero >= 1 else held)
    if layout.offload != "none":
        optimizer = 0.0
        gradients = 0.0 if zero >= 2 else gradients
    if layout.offload == "parameters":
        weights = 0.0
    flying = in_flight(layout, stage)
    kept = activations(job, rates, here) * flying
    if (waiting := deferred(layout, stage)) and layout.recompute == "none":
        without = replace(job, layout=replace(layout, recompute="selective"))
        kept -= (activations(job, rates, here) - activations(without, rates, here)) * waiting
    logits = rates.logit * job.tokens * config.vocab / layout.tp if here.head else 0.0
    return Bytes(
        weights, gradients, optimizer, kept, logits, _buffers(job, rates, here, held),
        kept * (rates.fragments - 1), _late(job, rates), rates.fixed * GIB,
    )  # fmt: skip


def fullest(job: Job, rates: Values) -> Bytes:
    """What the stage reserves that reserves the most: the first, the second, or the last.

    The second keeps a micro-batch less than the first, and may have a layer more.
    """
    some = {0, min(1, job.layout.pp - 1), job.layout.pp - 1}
    return max((footprint(job, rates, k) for k in some), key=lambda found: found.reserved)


def activations(job: Job, rates: Values, stage: Stage) -> float:
    """Bytes that the layers of a stage keep for one micro-batch."""
    config, profile, layout = job.config, job.profile, job.layout
    h, t = config.hidden, layout.tp
    if layout.recompute == "full":  # each layer's input; and one layer, while it is recomputed
        return stage.layers * job.stream / job.sequence
    again = computed_again(layout.recompute)
    network = profile.swiglu if config.mlp == "swiglu" else profile.gelu
    if "ffn" in again:  # what the wide products put out is kept, and not what becomes of it
        network = 4 if config.mlp == "swiglu" else 2
    outside = rates.kept - (2 * 2 if "norms" in again else 0)  # two norms' outputs, in 16 bits
    inside = profile.cut * 2 * (h + job.heads)
    if profile.attention == "plain" and "attention" not in again:
        inside += profile.scores * config.heads * job.seq
    each = stage.layers * (outside * h / job.sequence + inside / t)
    dense = stage.dense if config.experts else stage.layers
    for layers, none in ((dense, True), (stage.layers - dense, False)):
        rows = 0 if none else 2 * 2 * config.experts_per_token * h  # to the experts, and from them
        each += layers * (network * job.width(none) / t + rows / job.sequence)
    return job.tokens * each


def _buffers(job: Job, rates: Values, stage: Stage, held: float) -> float:
    layout, profile = job.layout, job.profile
    if layout.dp * layout.cp == 1:
        return 0.0
    if layout.zero == 0:
        return profile.bucket * held
    if layout.zero < 3:
        return rates.gathered * profile.weight * held
    layers = max(1, stage.layers)
    return (2 * profile.weight + profile.gradient) * held / layers


def _late(job: Job, rates: Values) -> float:
    """Buffers of the uncut stream that collectives still hold while the CPU runs ahead.

    It runs ahead of one micro-batch after the other, and in a pipeline waits for messages: half of
    the time on two stages, seldom on many.
    """
    layout = job.layout
    more = layout.microbatches - layout.pp + 1  # micro-batches after the pipeline has filled
    if layout.tp == 1 or more < 1:
        return 0.0
    there = 1 - exp(-more / rates.settled)
    ahead = 1 - 1 / layout.pp if layout.pp > 1 else 1.0
    return rates.late * there * ahead * job.stream
