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
from shardlab.layout.core import computed_again
from shardlab.layout.structure import Core, Kind, Routed

from . import copies, host
from .job import Job
from .products import NUMBER, cut, formats, passes, product, products, reached
from .rates import Values

SOFT = 6  # exponent of the smooth maximum (x^6 + y^6)^(1/6): 12 % above x where x = y
NARROW = 64  # head size up to which attention does not fill the chip

# Work of the backward pass as a multiple of the forward pass.
BACKWARD = 2  # one matrix product for the gradient of each of the two factors
FLASH_BACKWARD = 2.5  # 5 products for 2: recomputes scores. Dao 2023 (2307.08691), 4.1
FORWARD = 1 / 3  # hence forward's share of a layer's launches and cross-node latencies
# Share of backward's collectives that are all-gathers, under sequence parallelism: they
# come before compute, and cannot be hidden. The others are reduce-scatters, which can.
GATHERED = 0.5

# How often deferred weight gradients fill the bubble: once, or twice if more
# micro-batches start early. Qi et al. 2023 (arXiv 2401.10241).
FILLS = {"zb-h1": 1, "zb-h2": 2, "zb-v": 2}

# Predicted bytes over the limit: below the first no job retries, above the second all
# do, since predictions are off by some percent.
RETRIES = 0.94, 1.06


@dataclass(frozen=True)
class Seconds:
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

    def plus(self, other: _Work, times: float = 1.0) -> _Work:
        return _Work(*(x + times * y for x, y in zip(vars(self).values(), vars(other).values(),
                                                     strict=True)))  # fmt: skip

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def seconds(job: Job, rates: Values, needed: float = 0.0) -> Seconds:
    """Return the seconds of one step, part by part.

    needed: bytes of rank 0, which decide about retries. Raises ValueError for layers that the
    stages cannot share.
    """
    layers = {kind: layer(job, rates, kind) for kind in job.model.kinds}
    work = [_stage(job, rates, layers, stage) for stage in job.stages]
    slowest = max(work, key=lambda stage: stage.total)
    m = job.layout.microbatches
    busy = m * slowest.total
    first = sum(n * layers[kind][0].total for kind, n in job.layers(job.fullest))
    held = job.held(job.fullest)
    kept = held.shard(job.layout) if job.layout.zero else held.all
    parts = {name: m * value for name, value in vars(slowest).items()} | {
        "bubble": _bubble(job, layers, work, slowest),
        "messages": _messages(job, rates, busy),
        "data": copies.seconds(job, rates, job.fullest, busy, first),
        "optimizer": _optimizer(job, rates, held.all, kept),
        "host": host.seconds(job, rates, kept, busy),
    }
    parts["retries"] = sum(parts.values()) * (rates.retries - 1) * _likely(job, rates, needed)
    times = getattr(rates, job.profile.engine) if job.profile.engine else 1.0
    return Seconds(**{name: times * part for name, part in parts.items()})


Layers = dict[Kind, tuple[_Work, _Work]]  # forward and backward of each kind


def _stage(job: Job, rates: Values, layers: Layers, stage: Stage) -> _Work:
    """Return the work of a stage for one micro-batch: its layers, and the head on the last."""
    found = _Work().plus(_head(job, rates), 1) if stage.head else _Work()
    for (forward, backward), n in zip(
        layers.values(), job.model.counted(stage.chunks), strict=True
    ):
        if n:
            found = found.plus(forward, n).plus(backward, n)
    return found


def _bubble(job: Job, layers: Layers, work: list[_Work], slowest: _Work) -> float:
    """Return the seconds in which the slowest stage waits for the other stages."""
    layout = job.layout
    others = sum(stage.total for stage in work) - slowest.total
    if layout.schedule == "naive":
        return layout.microbatches * others if layout.pp > 1 else 0.0
    forward, backward = layers[job.model.largest]
    # The CPU launches ahead while the pipeline fills and drains.
    others -= sum(stage.launches for stage in work) - slowest.launches
    left = _left(layout, forward.total, backward.total, backward.products / BACKWARD)
    return others * left * _largest(job.stages)


def _largest(found: list[Stage]) -> float:
    """Return the largest chunk's layers over the fullest stage's layers."""
    chunk = max(len(chunk) for stage in found for chunk in stage.chunks)
    return chunk / max(stage.layers for stage in found)


def _likely(job: Job, rates: Values, needed: float) -> float:
    """Return the probability of allocator retries if a rank needs `needed` bytes."""
    some, every = RETRIES
    full = needed / (rates.limit * job.machine.memory)
    return min(1.0, max(0.0, (full - some) / (every - some)))


def _left(layout: Layout, forward: float, backward: float, weights: float) -> float:
    """Return the share of 1F1B's bubble that remains under the layout's schedule.

    weights: seconds of weight gradients in backward, which zero-bubble schedules defer
    into the bubble, as often as `FILLS` says.
    """
    fills = FILLS.get(layout.schedule, 0)
    filled = min(fills, (layout.microbatches - 1) / max(1, layout.pp - 1)) * weights
    return max(0.0, 1 - (weights + filled) / (forward + backward)) if fills else 1.0


def layer(job: Job, rates: Values, kind: Kind | None = None) -> tuple[_Work, _Work]:
    """Return the (forward, backward) work of one layer for one micro-batch."""
    kind = kind or job.model.kinds[job.model.order[-1]]
    attention, scores = _attention(job, rates, kind.core)
    width = (3 if kind.gated else 2) * passes(job, rates, kind.wide / job.layout.tp)
    width *= rates.wide * (1.0 if job.profile.compiled else rates.eager)
    stream = rates.elementwise * (1.0 if job.profile.compiled else rates.eager)
    forward = _Work(
        products=products(job, rates, kind),
        attention=attention + _scans(job, rates, kind),
        elementwise=_stream(job, rates, stream) + width + scores + formats(job, rates, kind),
        tensor=_tensor(job, rates),
        context=_context(job, rates, kind.core, attention),
        experts=_travel(job, rates, kind.routed),
    )
    waits = 1 - min(1.0, rates.hidden) + (GATHERED if job.sequence > 1 else 0.0)
    flash = job.profile.attention == "flash"
    backward = _Work(
        products=BACKWARD * forward.products,
        attention=(FLASH_BACKWARD if flash else BACKWARD) * attention,
        elementwise=BACKWARD * forward.elementwise,
        tensor=waits * forward.tensor,
        context=BACKWARD * forward.context,
        experts=forward.experts,
    )
    again = computed_again(job.layout.recompute)
    if job.layout.recompute == "full":
        backward = backward.plus(forward)
    if "attention" in again:
        backward = backward.plus(_Work(attention=attention, elementwise=scores))
    if "norms" in again:  # two norms, each with one read and one write
        backward.elementwise += _stream(job, rates, 2 * 2 * NUMBER)
    if "ffn" in again:
        backward.elementwise += width
    if "latents" in again:
        backward.products += sum(cut(job, rates, one) for one in kind.raised)
    both = _Work(
        launches=_launches(job, rates, kind, forward.total + backward.total),
        tensor=rates.beyond * (ceil(job.layout.tp / job.machine.per_node) - 1),
    )
    return forward.plus(both, FORWARD), backward.plus(both, 1 - FORWARD)


def _attention(job: Job, rates: Values, core: Core | None) -> tuple[float, float]:
    """Return the forward seconds of attention's products and of passes over scores."""
    if core is None:
        return 0.0, 0.0
    t, flash = job.layout.tp, job.profile.attention == "flash"
    work = job.tokens * core.flops(job.seq, causal=flash) / t  # flash: no masked pairs
    if flash:
        share = rates.attention * (rates.narrow if core.query <= NARROW else 1.0)
        return work / (reached(job, rates, share) * job.machine.flops), 0.0
    read = rates.scores * passes(job, rates, job.seq * core.heads / t)
    return work / (reached(job, rates, rates.products) * job.machine.flops), read


def _scans(job: Job, rates: Values, kind: Kind) -> float:
    """Return the forward seconds of products in state spaces and linear attention."""
    work = job.tokens * kind.scans / job.layout.tp
    return rates.scan * work / (rates.attention * job.machine.flops)


def _stream(job: Job, rates: Values, size: float) -> float:
    """Return the seconds to move `size` bytes per number of the residual stream."""
    taken = size * job.tokens * job.model.hidden / job.sequence
    return taken / (rates.memory * job.machine.stream)


def _launches(job: Job, rates: Values, kind: Kind, gpu: float) -> float:
    """Return by how much the smooth maximum of CPU and GPU seconds exceeds `gpu`."""
    cpu = _cpu(job, rates, kind)
    return (gpu**SOFT + cpu**SOFT) ** (1 / SOFT) - gpu if cpu else 0.0


def _cpu(job: Job, rates: Values, kind: Kind) -> float:
    """Return the seconds in which the CPU launches a layer, forward and backward."""
    layout = job.layout
    if job.captured:
        return 0.0
    crossing = layout.pp > 1 and job.nodes > 1
    cpu = rates.launch + (rates.deal if kind.routed else 0.0)
    cpu += (rates.crossing * (layout.tp - 1)) if crossing else 0.0
    return cpu * (1 + FORWARD) if layout.recompute == "full" else cpu


def pace(job: Job, rates: Values, kind: Kind) -> float:
    """Return a layer's GPU seconds over the seconds in which the CPU launches it.

    Above 1 the CPU runs ahead. The step must not be captured as a CUDA graph.
    """
    forward, backward = layer(job, rates, kind)
    both = forward.plus(backward)
    return (both.total - both.launches) / _cpu(job, rates, kind)


def _travel(job: Job, rates: Values, routed: Routed | None) -> float:
    """Return the seconds of the two all-to-alls: tokens to their experts, outputs back.

    Assumes that expert-parallel ranks stand as close together as tensor and context
    ranks allow, and that each GPU has a network card of its own.
    """
    layout, machine, e = job.layout, job.machine, job.layout.ep
    if e == 1 or routed is None:
        return 0.0
    tokens = job.tokens / job.sequence
    sent = NUMBER * tokens * routed.chosen * routed.inputs / e  # bytes to each rank
    apart = layout.cut if layout.etp is not None else layout.tp * layout.cp
    here = min(e, max(1, machine.per_node // apart))
    inside = (here - 1) * sent / (rates.node * machine.inside)
    far = (e - here) * sent
    if job.profile.once and e > here:  # a node gets one copy of each token
        nodes = e / here
        reached = (nodes - 1) * (1 - (1 - 1 / nodes) ** routed.chosen)
        far = NUMBER * tokens * routed.inputs * reached
    return 2 * max(inside, rates.travels * far / (rates.network * machine.between))


def _tensor(job: Job, rates: Values) -> float:
    """Return the seconds of a layer's two tensor-parallel all-reduces in forward."""
    t, machine = job.layout.tp, job.machine
    if t == 1:
        return 0.0
    rate = rates.node * machine.inside
    if t > machine.per_node:  # a ring over full nodes uses every network card of a node
        rate = min(rate, rates.network * machine.between * machine.per_node)
    return 2 * 2 * (t - 1) / t * job.stream / rate


def _context(job: Job, rates: Values, core: Core | None, attention: float) -> float:
    """Return the seconds in which forward receives keys and values of other ranks."""
    layout, c = job.layout, job.layout.cp
    if c == 1 or core is None:
        return 0.0
    near = c * layout.tp <= job.machine.per_node
    rate = rates.node * job.machine.inside if near else rates.network * job.machine.between
    taken = (c - 1) * NUMBER * job.tokens * core.pairs(layout.tp) / rate
    return max(0.0, taken - attention) if job.profile.hides else taken


def _head(job: Job, rates: Values) -> _Work:
    """Return the work of the output layer and the loss, forward and backward."""
    model, t = job.model, job.layout.tp
    taken = (1 + BACKWARD) * product(job, rates, model.vocab / t, model.hidden, whole=True)
    logits = job.tokens * model.vocab / t
    read = job.profile.loss * logits / (rates.memory * job.machine.stream)
    return _Work(products=taken, elementwise=read)


def _messages(job: Job, rates: Values, busy: float) -> float:
    """Return the seconds of a step's messages between stages, in both directions.

    Messages that are posted early overlap with other chunks, except while the pipeline
    fills or drains, and except for any excess over the compute time.
    """
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    far = job.nodes > 1
    rate = rates.network * job.machine.between if far else rates.node * job.machine.inside
    each = rates.message + job.stream / layout.tp / rate
    ends = 2 * layout.chunks * each * (layout.pp - 1)
    every = ends + 2 * layout.chunks * each * (layout.microbatches - 1)
    return max(ends, every - busy) if job.profile.posts and layout.chunks > 1 else every


def _optimizer(job: Job, rates: Values, held: float, kept: float) -> float:
    """Return the seconds to add up `held` gradients and update `kept` parameters."""
    layout, profile = job.layout, job.profile
    update = profile.update * kept if layout.offload == "none" else 0.0
    read = update + profile.accumulate * held * layout.microbatches
    return rates.step + read / (rates.memory * job.machine.stream)
