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
from math import exp

from shardlab.layout import Stage
from shardlab.layout.core import computed_again
from shardlab.memory import in_flight
from shardlab.memory.core import (
    Sizes,
    kept_by_projections,
    kept_by_softmax,
    sizes,
    states_of,
    wide_tensors,
)
from shardlab.memory.counting import of_both_kinds
from shardlab.memory.experts import FLOAT, kept_by_rows
from shardlab.memory.in_flight import deferred
from shardlab.memory.step import Unit

from .core import SOFT, pace
from .job import Job
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

    Raises ValueError for layers that the stages cannot share, and for a stage that is not there.
    """
    layout = job.layout
    if isinstance(stage, bool) or stage not in range(layout.pp):
        raise ValueError(f"stage={stage!r}: allowed are 0 to {layout.pp - 1}")
    return _reserved(job, rates, stage, layout.parts(job.config)[stage])


def _reserved(job: Job, rates: Values, stage: int, here: Stage) -> Bytes:
    layout, held = job.layout, job.held(here)
    state = states_of(held.all, held.shard(layout), layout, job.profile.recipe)
    flying = in_flight(layout, stage)
    kept = activations(job, rates, here) * flying
    if (waiting := deferred(layout, stage)) and layout.recompute == "none":
        without = replace(job, layout=replace(layout, recompute="selective"))
        kept -= (activations(job, rates, here) - activations(without, rates, here)) * waiting
    logits = rates.logit * _sizes(job).logits_fp32 / FLOAT if here.head else 0.0
    found = Bytes(
        state.parameters, state.gradients, state.optimizer, kept, logits,
        _buffers(job, rates, here, held.all),
        kept * (rates.fragments - 1), 0.0, rates.fixed * GIB,
    )  # fmt: skip
    # What would come back late does so at once where there is no room for it.
    most = max(0.0, rates.limit * job.machine.memory - found.reserved)
    return replace(found, late=min(_late(job, rates), most))


def fullest(job: Job, rates: Values) -> Bytes:
    """What the stage reserves that reserves the most: the first, the second, or the last.

    The second keeps a micro-batch less than the first, and may have a layer more.
    """
    here = job.layout.parts(job.config)
    some = {0, min(1, job.layout.pp - 1), job.layout.pp - 1}
    found = (_reserved(job, rates, k, here[k]) for k in some)
    return max(found, key=lambda one: one.reserved)


def activations(job: Job, rates: Values, stage: Stage) -> float:
    """Bytes that the layers of a stage keep for one micro-batch."""
    config, profile, z = job.config, job.profile, _sizes(job)
    if job.layout.recompute == "full":  # each layer's input
        return stage.layers * z.stream
    again = computed_again(job.layout.recompute)
    each = rates.kept * z.stream / z.element - (2 * z.stream if "norms" in again else 0)
    each += kept_by_projections(z)
    if profile.attention == "plain" and "attention" not in again:
        # Those who have it train with dropout. Keys come from all ranks that share a sequence.
        each += kept_by_softmax(z, True, "gpu") * job.layout.cp
    wide = wide_tensors(config, "ffn" in again, profile.wide)
    network = {False: wide * z.wide, True: wide * z.chosen + kept_by_rows(config, z)}
    return sum(n * (each + network[sparse]) for sparse, n in of_both_kinds(config, stage))


def _sizes(job: Job) -> Sizes:
    """Bytes of the tensors of a micro-batch, in 16 bits."""
    layout, seq = job.layout, job.seq // job.layout.cp
    return sizes(job.config, layout.micro_batch, seq, 2, layout.tp, job.sequence > 1)


def _buffers(job: Job, rates: Values, stage: Stage, held: int) -> float:
    layout, profile, recipe = job.layout, job.profile, job.profile.recipe
    if layout.dp * layout.cp == 1:
        return 0.0
    if layout.zero == 0:
        return profile.bucket * held
    if layout.zero < 3:
        return rates.gathered * recipe.parameters * held
    return Unit.of(job.config, layout, stage).gathered(recipe)


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
        stopped = 1 / (1 + pace(job, rates) ** SOFT) / (layout.pp - 1)
    return rates.late * there * (1 - stopped) * job.stream
