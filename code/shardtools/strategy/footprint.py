"""Memory of a stage, part by part: allocated bytes, and bytes that are reserved beside them.

`memory` counts model states, inputs of products, micro-batches in flight, and ZeRO-3's gathers.
This module adds what depends on an engine: saved tensors from its `Profile`, counted in its source;
from its measured `Rates` bytes outside of cut matrices, of the loss and of buffers.

An allocator reserves more than a program allocates: blocks do not fit into each other, and a buffer
that another stream still reads is freed late. Tools report the reserved bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, exp

from shardlab.layout import Stage
from shardlab.layout.core import parse_recompute
from shardlab.layout.structure import LayerKind
from shardlab.memory import count_in_flight
from shardlab.memory.activations import count_deferred
from shardlab.memory.core import WIDE_TENSORS, compute_states
from shardlab.memory.step_estimate import GatherUnit

from .core import SMOOTH_POWER, gpu_to_cpu_ratio
from .cost import ELEMENT_BYTES
from .job import Job
from .rates import RateValues

GIB = 2**30


@dataclass(frozen=True)
class RankMemory:
    """The bytes that one rank of a stage reserves, by part; `reserved` is their sum."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # saved for backward, for all micro-batches in flight
    logits: float  # and buffers of the loss
    buffers: float  # for gradients and weights in communication
    fragments: float  # lost to fragmentation between activations
    late_buffers: float  # tensor-parallel collectives' buffers that are freed late
    overhead: float  # independent of the layout, such as the CUDA context

    @property
    def allocated(self) -> float:
        """Bytes in use at the peak."""
        return self.reserved - self.fragments - self.late_buffers - self.overhead

    @property
    def required_bytes(self) -> float:
        """Bytes that the allocator must have: all except buffers that are freed late."""
        return self.reserved - self.late_buffers

    @property
    def reserved(self) -> float:
        """Bytes that the allocator has reserved."""
        return sum(vars(self).values())


def predict_memory(job: Job, rates: RateValues, stage: int = 0) -> RankMemory:
    """Return the bytes that a rank of `stage` (counted from 0) reserves.

    Raises ValueError if the stages cannot share the layers.
    """
    return _stage_memory(job, rates, stage, _late_buffer_bytes(job, rates))


def _stage_memory(job: Job, rates: RateValues, stage: int, late_bytes: float) -> RankMemory:
    """Return a stage's reserved bytes; late: bytes of late-freed buffers if memory allows them."""
    here = job.stages[stage]
    layout, held = job.layout, job.count_parameters(here)
    state = compute_states(held.total, held.count_sharded(layout), layout, job.profile.recipe)
    in_flight_count = count_in_flight(layout, stage)
    kept = activation_bytes(job, rates, here) * in_flight_count
    if (deferred_count := count_deferred(layout, stage)) and layout.recompute == "none":
        selective = replace(job, layout=replace(layout, recompute="selective"))
        saved = activation_bytes(job, rates, here) - activation_bytes(selective, rates, here)
        kept -= saved * deferred_count
    logits = here.has_head * rates.logit_bytes * job.tokens * ceil(job.model.vocab / layout.tp)
    parts = (
        state.parameters, state.gradients, state.optimizer, kept, logits,
        _buffer_bytes(job, rates, here, held.total), kept * (rates.fragments - 1),
    )  # fmt: skip
    fixed = rates.overhead * GIB
    # Without room for them, buffers are freed at once instead of late.
    free = max(0.0, rates.limit * job.machine.memory - sum((*parts, 0.0, fixed)))
    return RankMemory(*parts, min(late_bytes, free), fixed)


MemoryPair = tuple[RankMemory, RankMemory]  # of the first stage, and of the fullest


def predict_first_and_fullest(job: Job, rates: RateValues) -> MemoryPair:
    """Return the bytes of the first stage, and those of the stage that reserves the most.

    The fullest is the first, the last, or the second: a micro-batch less, perhaps a layer more.
    """
    late = _late_buffer_bytes(job, rates)
    stages = sorted({0, min(1, job.layout.pp - 1), job.layout.pp - 1})
    memory = [_stage_memory(job, rates, stage, late) for stage in stages]
    return memory[0], max(memory, key=lambda one: one.reserved)


def host_bytes(job: Job) -> int:
    """Return the bytes of host memory that a rank of the stage with most states uses."""
    layout, recipe = job.layout, job.profile.recipe
    if layout.offload == "none":
        return 0
    held = [job.count_parameters(stage) for stage in job.stages]
    return max(
        compute_states(one.total, one.count_sharded(layout), layout, recipe).host for one in held
    )


def activation_bytes(job: Job, rates: RateValues, stage: Stage) -> float:
    """Return the bytes that the layers of a stage save for one micro-batch."""
    if job.layout.recompute == "full":  # only each layer's input is saved
        return stage.layers * job.stream_bytes / job.sequence_shards
    return sum(n * _layer_activation_bytes(job, rates, kind) for kind, n in job.count_layers(stage))


def _layer_activation_bytes(job: Job, rates: RateValues, kind: LayerKind) -> float:
    """Return a layer's saved bytes; `rates.saved_bytes` holds for norms that save 4h."""
    again, profile, t = parse_recompute(job.layout.recompute), job.profile, job.layout.tp
    saved = rates.saved_bytes - (2 * ELEMENT_BYTES if "norms" in again else 0)
    stream = saved * kind.stream_elements / 4
    outside = stream + ELEMENT_BYTES * kind.latent_elements
    core = kind.core
    heads = ELEMENT_BYTES * t * kind.count_head_elements(t, again)
    if core and profile.attention == "plain" and "attention" not in again:
        # Engines with plain attention train with dropout: scores twice, and a mask of 1 B each.
        heads += (2 * ELEMENT_BYTES + 1) * core.heads * job.seq
    mlp = "swiglu" if kind.gated else "gelu"
    tensors = (WIDE_TENSORS if "ffn" in again else profile.mlp_tensors)[mlp]
    wide = ELEMENT_BYTES * (tensors // 2 if "ffn" in again else tensors) * kind.active_width
    rows = 2 * ELEMENT_BYTES * kind.routed.top_k * kind.routed.input_width if kind.routed else 0
    return job.tokens * ((outside + rows) / job.sequence_shards + (heads + wide) / t)


def _buffer_bytes(job: Job, rates: RateValues, stage: Stage, params: int) -> float:
    layout, profile, recipe = job.layout, job.profile, job.profile.recipe
    if layout.dp * layout.cp == 1:
        return 0.0
    if layout.zero == 0:
        return profile.bucket_bytes * params
    if layout.zero < 3:
        return rates.gather_buffers * recipe.parameters * params
    return GatherUnit.from_stage(job.model, layout, stage).gathered_bytes(recipe)


def _late_buffer_bytes(job: Job, rates: RateValues) -> float:
    """Return the bytes of uncut-stream buffers that collectives hold while the CPU runs ahead.

    Without a pipeline nothing stops the CPU from running ahead, and in one node little does. A
    stage whose neighbours are on other nodes waits for their messages, except in its first p - 1
    passes; of these only the first counts, and only if the GPU is slower than the CPU.
    """
    layout = job.layout
    if layout.tp == 1:
        return 0.0
    settled = 1 - exp(-layout.microbatches / rates.settling_microbatches)
    stopped = 0.0
    if layout.pp > 1 and job.nodes > 1:
        ratio = gpu_to_cpu_ratio(job, rates, job.model.largest_kind)
        stopped = 1 / (1 + ratio**SMOOTH_POWER) / (layout.pp - 1)
    return rates.late_buffers * settled * (1 - stopped) * job.stream_bytes
