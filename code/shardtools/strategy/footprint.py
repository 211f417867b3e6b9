"""Memory of a stage, part by part: allocated bytes, and bytes that are reserved beside them.

`memory` counts model states, inputs of products, micro-batches in flight, and ZeRO-3's gathers.
This module adds what depends on an engine: saved tensors from its `Profile`, counted in its source;
from its measured `Rates` bytes outside of cut matrices (`kept`), of the loss (`logit`), of buffers.

An allocator reserves more than a program allocates: blocks do not fit into each other, and a buffer
that another stream still reads is freed late. Tools report the reserved bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, exp

from shardlab.layout import Stage
from shardlab.layout.core import computed_again
from shardlab.layout.structure import Kind
from shardlab.memory import in_flight
from shardlab.memory.activations import deferred
from shardlab.memory.core import WIDE, states_of
from shardlab.memory.step import Unit

from .core import SOFT, pace
from .job import Job
from .products import NUMBER
from .rates import Values

GIB = 2**30


@dataclass(frozen=True)
class Bytes:
    """The bytes that one rank of a stage reserves, by part; `reserved` is their sum."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # saved for backward, for all micro-batches in flight
    logits: float  # and buffers of the loss
    buffers: float  # for gradients and weights in communication
    fragments: float  # lost to fragmentation between activations
    late: float  # tensor-parallel collectives' buffers that are freed late
    fixed: float

    @property
    def allocated(self) -> float:
        """Bytes in use at the peak."""
        return self.reserved - self.fragments - self.late - self.fixed

    @property
    def needed(self) -> float:
        """Bytes that the allocator must have: all except buffers that are freed late."""
        return self.reserved - self.late

    @property
    def reserved(self) -> float:
        """Bytes that the allocator has reserved."""
        return sum(vars(self).values())


def footprint(job: Job, rates: Values, stage: int = 0) -> Bytes:
    """Return the bytes that a rank of `stage` (counted from 0) reserves.

    Raises ValueError if the stages cannot share the layers.
    """
    return _reserved(job, rates, stage, _late(job, rates))


def _reserved(job: Job, rates: Values, stage: int, late: float) -> Bytes:
    """Return a stage's reserved bytes; late: bytes of late-freed buffers if there were room."""
    here = job.stages[stage]
    layout, held = job.layout, job.held(here)
    state = states_of(held.all, held.shard(layout), layout, job.profile.recipe)
    flying = in_flight(layout, stage)
    kept = activations(job, rates, here) * flying
    if (waiting := deferred(layout, stage)) and layout.recompute == "none":
        without = replace(job, layout=replace(layout, recompute="selective"))
        kept -= (activations(job, rates, here) - activations(without, rates, here)) * waiting
    logits = here.head * rates.logit * job.tokens * ceil(job.model.vocab / layout.tp)
    parts = (
        state.parameters, state.gradients, state.optimizer, kept, logits,
        _buffers(job, rates, here, held.all), kept * (rates.fragments - 1),
    )  # fmt: skip
    fixed = rates.fixed * GIB
    # Without room for them, buffers are freed at once instead of late.
    most = max(0.0, rates.limit * job.machine.memory - sum((*parts, 0.0, fixed)))
    return Bytes(*parts, min(late, most), fixed)


def fullest(job: Job, rates: Values) -> Bytes:
    """Return the bytes of the stage that reserves the most."""
    return first_and_fullest(job, rates)[1]


def first_and_fullest(job: Job, rates: Values) -> tuple[Bytes, Bytes]:
    """Return the bytes of the first stage, and those of the stage that reserves the most.

    The fullest is the first, the last, or the second: a micro-batch less, perhaps a layer more.
    """
    late = _late(job, rates)
    some = sorted({0, min(1, job.layout.pp - 1), job.layout.pp - 1})
    found = [_reserved(job, rates, k, late) for k in some]
    return found[0], max(found, key=lambda one: one.reserved)


def on_host(job: Job) -> int:
    """Return the bytes of host memory that a rank of the stage with most states uses."""
    layout, recipe = job.layout, job.profile.recipe
    if layout.offload == "none":
        return 0
    held = [job.held(stage) for stage in job.stages]
    return max(states_of(one.all, one.shard(layout), layout, recipe).host for one in held)


def activations(job: Job, rates: Values, stage: Stage) -> float:
    """Return the bytes that the layers of a stage save for one micro-batch."""
    if job.layout.recompute == "full":  # only each layer's input is saved
        return stage.layers * job.stream / job.sequence
    return sum(n * _kept(job, rates, kind) for kind, n in job.layers(stage))


def _kept(job: Job, rates: Values, kind: Kind) -> float:
    """Return a layer's saved bytes; `rates.kept` is that of norms which keep 4h of the stream."""
    again, profile, t = computed_again(job.layout.recompute), job.profile, job.layout.tp
    stream = (rates.kept - (2 * NUMBER if "norms" in again else 0)) * kind.stream / 4
    outside = stream + NUMBER * kind.latent
    core = kind.core
    heads = NUMBER * t * kind.heads_on(t, again)
    if core and profile.attention == "plain" and "attention" not in again:
        # Engines with plain attention train with dropout: scores twice, and a mask of 1 B each.
        heads += (2 * NUMBER + 1) * core.heads * job.seq
    tensors = (WIDE if "ffn" in again else profile.wide)["swiglu" if kind.gated else "gelu"]
    wide = NUMBER * (tensors // 2 if "ffn" in again else tensors) * kind.wide
    rows = 2 * NUMBER * kind.routed.chosen * kind.routed.inputs if kind.routed else 0
    return job.tokens * ((outside + rows) / job.sequence + (heads + wide) / t)


def _buffers(job: Job, rates: Values, stage: Stage, held: int) -> float:
    layout, profile, recipe = job.layout, job.profile, job.profile.recipe
    if layout.dp * layout.cp == 1:
        return 0.0
    if layout.zero == 0:
        return profile.bucket * held
    if layout.zero < 3:
        return rates.gathered * recipe.parameters * held
    return Unit.of(job.model, layout, stage).gathered(recipe)


def _late(job: Job, rates: Values) -> float:
    """Return the bytes of uncut-stream buffers that collectives hold while the CPU runs ahead.

    Without a pipeline nothing stops the CPU from running ahead, and in one node little does. A
    stage whose neighbours are on other nodes waits for their messages, except in its first p - 1
    passes; of these only the first counts, and only if the GPU is slower than the CPU.
    """
    layout = job.layout
    if layout.tp == 1:
        return 0.0
    there = 1 - exp(-layout.microbatches / rates.settled)
    stopped = 0.0
    if layout.pp > 1 and job.nodes > 1:
        stopped = 1 / (1 + pace(job, rates, job.model.largest) ** SOFT) / (layout.pp - 1)
    return rates.late * there * (1 - stopped) * job.stream
