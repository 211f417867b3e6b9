"""Step time, part by part: an implementation's work at given rates.

Symbols as in `cost`: P parameters, L layers, h hidden, F width, V vocabulary, s tokens of a
sequence, b sequences of a micro-batch, m micro-batches, d data-parallel copies, t, p and c tensor,
pipeline and context degrees, v chunks of a stage.

    a layer    the smooth maximum of GPU time (matrix products in whole waves of tiles, attention,
               memory passes, exposed tensor collectives) and CPU time (launches)
    a stage    its layers; on the last stage also the head and the loss
    a step     m times the slowest stage; the pipeline's bubble; messages between stages; exposed
               data-parallel traffic; the optimizer; allocator retries where memory is short
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from shardlab.layout import Layout, Stage
from shardlab.layout.core import parse_recompute
from shardlab.layout.structure import LayerKind, RoutedExperts

from .cost import ELEMENT_BYTES
from .data_parallel import data_parallel_seconds
from .job import Job
from .matmuls import (
    cap_share,
    layer_matmul_seconds,
    matmul_seconds,
    memory_pass_seconds,
    reformat_seconds,
    shard_seconds,
)
from .offload import offload_seconds
from .rates import RateValues

SMOOTH_POWER = 6  # of the smooth maximum (x^6 + y^6)^(1/6): 12 % above x where x = y
NARROW_HEAD_SIZE = 64  # up to this head size attention does not fill the chip

# Work of the backward pass as a multiple of the forward pass.
BACKWARD_RATIO = 2  # one matrix product for the gradient of each of the two factors
FLASH_BACKWARD_RATIO = 2.5  # 5 products for 2: recomputes scores. Dao 2023 (2307.08691), 4.1
FORWARD_SHARE = 1 / 3  # forward's resulting share of a layer's launches and cross-node latencies
# Share of backward's collectives that are all-gathers, under sequence parallelism: they
# come before compute, and cannot be hidden. The others are reduce-scatters, which can.
ALL_GATHER_SHARE = 0.5

# How often deferred weight gradients fill the bubble: once, or twice if more
# micro-batches start early. Qi et al. 2023 (arXiv 2401.10241).
BUBBLE_FILLS = {"zb-h1": 1, "zb-h2": 2, "zb-v": 2}

# Predicted bytes over the allocator's limit. Below the first ratio no job is predicted to
# retry, above the second every job is: predictions are off by some percent.
RETRY_THRESHOLDS = 0.94, 1.06


@dataclass(frozen=True)
class StepSeconds:
    """The parts of a step in seconds; `total` is their sum."""

    products: float  # matrix products, on the slowest stage
    attention: float
    elementwise: float  # memory passes: norms, activations, plain scores, the loss
    launches: float  # CPU launch time that exceeds GPU time
    tensor: float  # tensor-parallel collectives, and their latencies beyond the node
    context: float  # keys and values from the other context ranks
    experts: float  # all-to-alls: tokens to experts on other ranks, and back
    bubble: float
    messages: float  # between pipeline stages
    data: float  # between data-parallel copies, and ends of a tied embedding
    optimizer: float
    host: float  # offloaded states: transfers to and from the host, and updates there
    retries: float  # allocator retries where memory is short

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(vars(self).values())


@dataclass
class _Work:
    """Seconds of one layer or head for one micro-batch, by part; or sums of these."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launches: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0

    def add_scaled(self, other: _Work, times: float = 1.0) -> _Work:
        return _Work(*(x + times * y for x, y in zip(vars(self).values(), vars(other).values(),
                                                     strict=True)))  # fmt: skip

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def predict_seconds(job: Job, rates: RateValues, needed: float = 0.0) -> StepSeconds:
    """Return the seconds of one step, part by part.

    needed: bytes that rank 0 needs, for the probability of retries. Raises ValueError
    for layers that the stages cannot share.
    """
    layers = {kind: predict_layer(job, rates, kind) for kind in job.model.kinds}
    work = [_stage_work(job, rates, layers, stage) for stage in job.stages]
    slowest = max(work, key=lambda stage: stage.total)
    m = job.layout.microbatches
    busy = m * slowest.total
    fullest = job.fullest_stage
    first = sum(n * layers[kind][0].total for kind, n in job.count_layers(fullest))
    held = job.count_parameters(fullest)
    kept = held.count_sharded(job.layout) if job.layout.zero else held.total
    parts = {name: m * value for name, value in vars(slowest).items()} | {
        "bubble": _bubble_seconds(job, layers, work, slowest),
        "messages": _message_seconds(job, rates, busy),
        "data": data_parallel_seconds(job, rates, fullest, busy, first),
        "optimizer": _optimizer_seconds(job, rates, held.total, kept),
        "host": offload_seconds(job, rates, kept, busy),
    }
    retry = _retry_probability(job, rates, needed)
    parts["retries"] = sum(parts.values()) * (rates.retries - 1) * retry
    times = getattr(rates, job.profile.engine_rate) if job.profile.engine_rate else 1.0
    return StepSeconds(**{name: times * part for name, part in parts.items()})


WorkPair = tuple[_Work, _Work]  # forward and backward
Layers = dict[LayerKind, WorkPair]


def _stage_work(job: Job, rates: RateValues, layers: Layers, stage: Stage) -> _Work:
    """Return a stage's work for one micro-batch, on the last stage with the head."""
    work = _head_work(job, rates) if stage.has_head else _Work()
    counts = job.model.count_kinds(stage.chunks)
    for (forward, backward), n in zip(layers.values(), counts, strict=True):
        if n:
            work = work.add_scaled(forward, n).add_scaled(backward, n)
    return work


def _bubble_seconds(job: Job, layers: Layers, work: list[_Work], slow: _Work) -> float:
    """Return the seconds in which the slowest stage waits for the other stages."""
    layout = job.layout
    others = sum(stage.total for stage in work) - slow.total
    if layout.schedule == "naive":
        return layout.microbatches * others if layout.pp > 1 else 0.0
    forward, backward = layers[job.model.largest_kind]
    # The CPU launches ahead while the pipeline fills and drains.
    others -= sum(stage.launches for stage in work) - slow.launches
    weights = backward.products / BACKWARD_RATIO
    share = _bubble_share(layout, forward.total, backward.total, weights)
    largest = max(len(chunk) for stage in job.stages for chunk in stage.chunks)
    return others * share * (largest / max(stage.layers for stage in job.stages))


def _retry_probability(job: Job, rates: RateValues, needed_bytes: float) -> float:
    some, every = RETRY_THRESHOLDS
    full = needed_bytes / (rates.limit * job.machine.memory)
    return min(1.0, max(0.0, (full - some) / (every - some)))


def _bubble_share(layout: Layout, fwd: float, bwd: float, weights: float) -> float:
    """Return the share of 1F1B's bubble that remains under the layout's schedule.

    weights: seconds of weight gradients in backward, which zero-bubble schedules defer
    into the bubble, as often as `BUBBLE_FILLS` says.
    """
    fills = BUBBLE_FILLS.get(layout.schedule, 0)
    filled = min(fills, (layout.microbatches - 1) / max(1, layout.pp - 1)) * weights
    return max(0.0, 1 - (weights + filled) / (fwd + bwd)) if fills else 1.0


def predict_layer(job: Job, rates: RateValues, kind: LayerKind | None = None) -> WorkPair:
    """Return the (forward, backward) work of one layer for one micro-batch."""
    kind = kind or job.model.kinds[job.model.layer_kinds[-1]]
    attention, scores = _attention_seconds(job, rates, kind)
    width = memory_pass_seconds(job, rates, kind.active_width / job.layout.tp)
    width *= 3 if kind.gated else 2
    width *= rates.mlp_passes * (1.0 if job.profile.is_compiled else rates.eager)
    stream = rates.elementwise * (1.0 if job.profile.is_compiled else rates.eager)
    streamed = _stream_seconds(job, rates, stream)
    forward = _Work(
        products=layer_matmul_seconds(job, rates, kind),
        attention=attention + _scan_seconds(job, rates, kind),
        elementwise=streamed + width + scores + reformat_seconds(job, rates, kind),
        tensor=_all_reduce_seconds(job, rates),
        context=_context_seconds(job, rates, kind, attention),
        experts=_all_to_all_seconds(job, rates, kind.routed),
    )
    exposed = 1 - min(1.0, rates.overlapped_collectives)
    exposed += ALL_GATHER_SHARE if job.sequence_shards > 1 else 0.0
    flash = job.profile.attention == "flash"
    backward = _Work(
        products=BACKWARD_RATIO * forward.products,
        attention=(FLASH_BACKWARD_RATIO if flash else BACKWARD_RATIO) * attention,
        elementwise=BACKWARD_RATIO * forward.elementwise,
        tensor=exposed * forward.tensor,
        context=BACKWARD_RATIO * forward.context,
        experts=forward.experts,
    )
    again = parse_recompute(job.layout.recompute)
    if job.layout.recompute == "full":
        backward = backward.add_scaled(forward)
    if "attention" in again:
        backward = backward.add_scaled(_Work(attention=attention, elementwise=scores))
    if "norms" in again:  # two norms, each with one read and one write
        backward.elementwise += _stream_seconds(job, rates, 2 * 2 * ELEMENT_BYTES)
    if "ffn" in again:
        backward.elementwise += width
    if "latents" in again:
        backward.products += sum(shard_seconds(job, rates, p) for p in kind.up_projections)
    both = _Work(
        launches=_launch_seconds(job, rates, kind, forward.total + backward.total),
        tensor=rates.extra_node * (ceil(job.layout.tp / job.machine.gpus_per_node) - 1),
    )
    forward = forward.add_scaled(both, FORWARD_SHARE)
    return forward, backward.add_scaled(both, 1 - FORWARD_SHARE)


def _attention_seconds(job: Job, rates: RateValues, kind: LayerKind) -> tuple[float, float]:
    """Return the forward seconds of attention's products and of passes over scores."""
    if (core := kind.core) is None:
        return 0.0, 0.0
    t, flash = job.layout.tp, job.profile.attention == "flash"
    work = job.tokens * core.count_flops(job.seq, causal=flash) / t  # flash: no masked pairs
    if flash:
        narrow = rates.narrow_heads if core.head_size <= NARROW_HEAD_SIZE else 1.0
        share = rates.attention * narrow
        return work / (cap_share(job, rates, share) * job.machine.flops), 0.0
    read = rates.scores * memory_pass_seconds(job, rates, job.seq * core.heads / t)
    return work / (cap_share(job, rates, rates.products) * job.machine.flops), read


def _scan_seconds(job: Job, rates: RateValues, kind: LayerKind) -> float:
    """Return the forward seconds of products in state spaces and linear attention."""
    work = job.tokens * kind.extra_flops / job.layout.tp
    return rates.scan * work / (rates.attention * job.machine.flops)


def _stream_seconds(job: Job, rates: RateValues, size: float) -> float:
    """Return the seconds to move `size` bytes per number of the residual stream."""
    taken = size * job.tokens * job.model.hidden / job.sequence_shards
    return taken / (rates.memory * job.machine.memory_bandwidth)


def _launch_seconds(job: Job, rates: RateValues, kind: LayerKind, gpu: float) -> float:
    """Return by how much the smooth maximum of CPU and GPU seconds exceeds `gpu`."""
    cpu = _cpu_seconds(job, rates, kind)
    p = SMOOTH_POWER
    return (gpu**p + cpu**p) ** (1 / p) - gpu if cpu else 0.0


def _cpu_seconds(job: Job, rates: RateValues, kind: LayerKind) -> float:
    """Return the seconds in which the CPU launches a layer, forward and backward."""
    layout = job.layout
    if job.is_captured:
        return 0.0
    crossing = layout.pp > 1 and job.nodes > 1
    cpu = rates.launch + (rates.expert_launch if kind.routed else 0.0)
    cpu += (rates.crossing * (layout.tp - 1)) if crossing else 0.0
    return cpu * (1 + FORWARD_SHARE) if layout.recompute == "full" else cpu


def gpu_to_cpu_ratio(job: Job, rates: RateValues, kind: LayerKind) -> float:
    """Return a layer's GPU seconds over its CPU seconds; the job must not be captured."""
    forward, backward = predict_layer(job, rates, kind)
    both = forward.add_scaled(backward)
    return (both.total - both.launches) / _cpu_seconds(job, rates, kind)


def _all_to_all_seconds(job: Job, rates: RateValues, routed: RoutedExperts | None) -> float:
    """Return the seconds of the two all-to-alls: tokens to their experts, outputs back.

    Assumes that expert-parallel ranks are placed as close together as tensor and context
    ranks allow, and that each GPU has a network card of its own.
    """
    layout, machine, e = job.layout, job.machine, job.layout.ep
    if e == 1 or routed is None:
        return 0.0
    tokens = job.tokens / job.sequence_shards
    sent = ELEMENT_BYTES * tokens * routed.top_k * routed.input_width / e  # bytes to each rank
    stride = layout.expert_tp if layout.etp is not None else layout.tp * layout.cp
    here = min(e, max(1, machine.gpus_per_node // stride))
    node, network = _link_rates(job, rates)
    far = (e - here) * sent
    if job.profile.sends_tokens_once and e > here:  # a node gets one copy of each token
        nodes = e / here
        reached = (nodes - 1) * (1 - (1 - 1 / nodes) ** routed.top_k)
        far = ELEMENT_BYTES * tokens * routed.input_width * reached
    return 2 * max((here - 1) * sent / node, rates.exposed_all_to_all * far / network)


def _link_rates(job: Job, rates: RateValues) -> tuple[float, float]:
    """Return the bytes per second inside a node, and those of a GPU's network card."""
    node = rates.node * job.machine.node_bandwidth
    return node, rates.network * job.machine.network_bandwidth


def _all_reduce_seconds(job: Job, rates: RateValues) -> float:
    """Return the seconds of a layer's two tensor-parallel all-reduces in forward."""
    t, machine = job.layout.tp, job.machine
    if t == 1:
        return 0.0
    rate, network = _link_rates(job, rates)
    if t > machine.gpus_per_node:  # a ring over full nodes uses every card of a node
        rate = min(rate, network * machine.gpus_per_node)
    return 2 * 2 * (t - 1) / t * job.stream_bytes / rate


def _context_seconds(job: Job, rates: RateValues, kind: LayerKind, compute: float) -> float:
    """Return the seconds in which forward receives keys and values of other ranks."""
    layout, c, core = job.layout, job.layout.cp, kind.core
    if c == 1 or core is None:
        return 0.0
    node, network = _link_rates(job, rates)
    rate = node if c * layout.tp <= job.machine.gpus_per_node else network
    taken = (c - 1) * ELEMENT_BYTES * job.tokens * core.count_kv_elements(layout.tp) / rate
    return max(0.0, taken - compute) if job.profile.overlaps_context else taken


def _head_work(job: Job, rates: RateValues) -> _Work:
    """Return the work of the output layer and the loss, forward and backward."""
    model, t = job.model, job.layout.tp
    forward = matmul_seconds(job, rates, model.vocab / t, model.hidden, in_16_bits=True)
    logits = job.tokens * model.vocab / t
    read = job.profile.loss_bytes * logits
    read /= rates.memory * job.machine.memory_bandwidth
    return _Work(products=(1 + BACKWARD_RATIO) * forward, elementwise=read)


def _message_seconds(job: Job, rates: RateValues, busy: float) -> float:
    """Return the seconds of a step's messages between stages, in both directions.

    Messages that are posted early overlap with other chunks, except while the pipeline
    fills or drains, and except for any excess over the compute time.
    """
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    node, network = _link_rates(job, rates)
    rate = network if job.nodes > 1 else node
    each = rates.message_latency + job.stream_bytes / layout.tp / rate
    ends = 2 * layout.chunks * each * (layout.pp - 1)
    every = ends + 2 * layout.chunks * each * (layout.microbatches - 1)
    early = job.profile.posts_messages_early and layout.chunks > 1
    return max(ends, every - busy) if early else every


def _optimizer_seconds(job: Job, rates: RateValues, params: float, own: float) -> float:
    """Return the seconds to accumulate a rank's gradients and update its shard."""
    layout, profile = job.layout, job.profile
    update = profile.update_bytes * own if layout.offload == "none" else 0.0
    read = update + profile.accumulate_bytes * params * layout.microbatches
    return rates.step + read / (rates.memory * job.machine.memory_bandwidth)
