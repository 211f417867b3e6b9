"""How much memory a stage takes, part by part: what is allocated, and what is reserved with it.

`memory` counts model states, what goes into a layer's products, micro-batches in flight, and what
ZeRO-3 gathers. What an engine has of its own comes on top: tensors by its `Profile`, as its source
has them; bytes outside of the cut matrices (`kept`), of the loss (`logit`), and of buffers by its
`Rates`, which are measured.

An allocator reserves more than a program holds: blocks do not fit one into another, and a buffer
that another stream still reads comes back late. Tools report the reserved bytes.
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
    def needed(self) -> float:
        """Bytes that the allocator has to have: all but those that come back late."""
        return self.reserved - self.late

    @property
    def reserved(self) -> float:
        """Bytes that the allocator has taken."""
        return sum(vars(self).values())


def footprint(job: Job, rates: Values, stage: int = 0) -> Bytes:
    """What a rank of `stage` reserves, counted from 0.

    Raises ValueError for layers that the stages cannot share.
    """
    return _reserved(job, rates, stage, _late(job, rates))


def _reserved(job: Job, rates: Values, stage: int, late: float) -> Bytes:
    """late: what buffers that come back late would take, if there were room."""
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
    # What would come back late does so at once where there is no room for it.
    most = max(0.0, rates.limit * job.machine.memory - sum((*parts, 0.0, fixed)))
    return Bytes(*parts, min(late, most), fixed)


def fullest(job: Job, rates: Values) -> Bytes:
    """What the stage reserves that reserves the most."""
    return first_and_fullest(job, rates)[1]


def first_and_fullest(job: Job, rates: Values) -> tuple[Bytes, Bytes]:
    """What the first stage reserves; and what that does which reserves the most.

    It is the first, the second, or the last. The second keeps a micro-batch less than the first,
    and may have a layer more.
    """
    late = _late(job, rates)
    some = sorted({0, min(1, job.layout.pp - 1), job.layout.pp - 1})
    found = [_reserved(job, rates, k, late) for k in some]
    return found[0], max(found, key=lambda one: one.reserved)


def on_host(job: Job) -> int:
    """Bytes of states that a rank keeps in the host's memory: of the stage that has most."""
    layout, recipe = job.layout, job.profile.recipe
    if layout.offload == "none":
        return 0
    held = [job.held(stage) for stage in job.stages]
    return max(states_of(one.all, one.shard(layout), layout, recipe).host for one in held)


def activations(job: Job, rates: Values, stage: Stage) -> float:
    """Bytes that the layers of a stage keep for one micro-batch."""
    if job.layout.recompute == "full":  # each layer's input
        return stage.layers * job.stream / job.sequence
    return sum(n * _kept(job, rates, kind) for kind, n in job.layers(stage))


def _kept(job: Job, rates: Values, kind: Kind) -> float:
    """Bytes that a layer keeps; `rates.kept`: of the stream, by one whose norms keep 4h of it."""
    again, profile, t = computed_again(job.layout.recompute), job.profile, job.layout.tp
    stream = (rates.kept - (2 * NUMBER if "norms" in again else 0)) * kind.stream / 4
    outside = stream + NUMBER * kind.latent
    core = kind.core
    heads = NUMBER * t * kind.heads_on(t, again)
    if core and profile.attention == "plain" and "attention" not in again:
        # Those who have it train with dropout: scores twice, and a mask of bytes.
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
    """Buffers of the uncut stream that collectives still hold while the CPU runs ahead.

    It runs ahead where nothing stops it. Without a pipeline nothing does, and in a node little; a
    stage whose neighbours are on other nodes waits for their messages, but for the p - 1 passes it
    begins with. Of these the first counts only where the GPU is slower than the CPU.
    """
    layout = job.layout
    if layout.tp == 1:
        return 0.0
    there = 1 - exp(-layout.microbatches / rates.settled)
    stopped = 0.0
    if layout.pp > 1 and job.nodes > 1:
        stopped = 1 / (1 + pace(job, rates, job.model.largest) ** SOFT) / (layout.pp - 1)
    return rates.late * there * (1 - stopped) * job.stream
