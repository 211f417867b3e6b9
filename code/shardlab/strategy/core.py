"""How long a step takes, part by part: what an implementation does, at rates found elsewhere.

Letters as in `cost`: P parameters, L layers, h hidden, F width, V vocabulary, s tokens of a
sequence, b sequences of a micro-batch, m micro-batches, d copies, t, p and c cuts, v chunks.

    a layer    the longer, softly, of what the GPU and what the CPU takes. The GPU: products in
               whole waves of tiles, attention, element-wise passes over memory, and those sums of
               the tensor group that nothing hides. The CPU: launches. Beyond the node a latency
    a stage    its layers; on the last the head and the loss
    a step     m times the slowest stage, and the others once, less what the schedule fills;
               messages between stages; the traffic of the copies that backward does not hide; the
               optimizer; and where memory is short, the allocator's retries
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from shardlab.layout import Layout, Stage
from shardlab.layout.core import computed_again
from shardlab.machines import MACHINES

from . import copies
from .job import Job
from .rates import Values

SOFT = 6  # of the longer of two: (x^6 + y^6)^(1/6), 12 % above where they are equal
TILE = 128, 256  # of a product's output, which one multiprocessor computes
NUMBER = 2  # bytes of a 16-bit one, in which activations and their gradients are held and sent

# Work of backward, in that of forward.
BACKWARD = 2  # a product for the gradient of each of its two factors
FLASH_BACKWARD = 2.5  # five products for two: scores anew. Dao 2023 (arXiv 2307.08691), section 4.1
FORWARD = 1 / 3  # forward's share of what both launch and wait for, by that
# Where the stream is cut too, backward waits at least for this share of its collectives: it has to
# gather a gradient before it can compute anything. The other share are sums, which can be hidden.
GATHERED = 0.5

# How often weights' gradients that wait fill the bubble: once, or twice where more micro-batches
# begin early. Qi et al. 2023 (arXiv 2401.10241).
FILLS = {"zb-h1": 1, "zb-h2": 2, "zb-v": 2}

# Of needed bytes over a GPU's limit, as predicted, which is off by some percent: below the first no
# run is to retry, above the second all of them.
RETRIES = 0.94, 1.06

# Megatron's rates were found on these; another chip reaches them as its best product does.
A100 = MACHINES["a100"].best


@dataclass(frozen=True)
class Seconds:
    """Parts of a step, which add up to its `total`."""

    products: float  # of matrices, on the slowest stage
    attention: float
    elementwise: float  # passes over memory: norms, activations, plain attention's scores, the loss
    launches: float  # what the CPU takes longer than the GPU
    tensor: float  # sums inside of layers, and latencies beyond the node
    context: float  # keys and values of the other ranks of a sequence
    experts: float  # tokens on their way to experts on other ranks, and back
    bubble: float
    messages: float  # from stage to stage
    data: float  # between the copies, and between the two ends of a tied embedding
    optimizer: float
    retries: float  # of an allocator that is short of memory

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())


@dataclass
class _Work:
    """Seconds of one layer or head for one micro-batch, by part; sums and multiples of such."""

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
    """Seconds of one step, as they are to be expected; bytes `needed` on rank 0 decide about
    retries.

    Raises ValueError for layers that the stages cannot share.
    """
    layout = job.layout
    m, v = layout.microbatches, layout.chunks
    forward, backward = layer(job, rates)
    each, head = forward.plus(backward), _head(job, rates)
    plain = _Work.plus(*layer(job, rates, dense=True)) if job.config.dense_layers else each
    found = layout.parts(job.config)
    work = [
        _Work().plus(each, stage.layers - stage.dense).plus(plain, stage.dense)
        .plus(head, stage.head)
        for stage in found
    ]  # fmt: skip
    slowest = max(work, key=lambda stage: stage.total)
    others = sum(stage.total for stage in work) - slowest.total
    if layout.schedule == "naive":
        bubble = m * others if layout.pp > 1 else 0.0
    else:
        weights = backward.products / BACKWARD
        bubble = others * _left(layout, forward.total, backward.total, weights) / v
    fullest = max(found, key=lambda stage: job.held(stage).all)
    busy = slowest.total * m
    first = forward.total * fullest.layers  # what hides the weights that come for it
    last = backward.total * fullest.layers  # what hides the gradients of a step
    data = copies.seconds(job, rates, fullest, busy, first, last)
    step = _optimizer(job, rates, fullest)
    messages = _messages(job, rates)
    total = busy + bubble + messages + data + step
    retries = total * (rates.retries - 1) * _likely(job, rates, needed)
    parts = {name: m * value for name, value in vars(slowest).items()}
    return Seconds(**parts, bubble=bubble, messages=messages, data=data, optimizer=step,
                   retries=retries)  # fmt: skip


def _likely(job: Job, rates: Values, needed: float) -> float:
    """How likely the allocator retries, where so many bytes are needed."""
    some, every = RETRIES
    full = needed / (rates.limit * job.machine.memory)
    return min(1.0, max(0.0, (full - some) / (every - some)))


def _left(layout: Layout, forward: float, backward: float, weights: float) -> float:
    """The share of 1F1B's bubble that a schedule leaves.

    weights: what of backward can wait, and fills, as often as `FILLS` says; and no more than there
    is, one for each micro-batch but the last.
    """
    fills = FILLS.get(layout.schedule, 0)
    filled = min(fills, (layout.microbatches - 1) / max(1, layout.pp - 1)) * weights
    return max(0.0, 1 - (weights + filled) / (forward + backward)) if fills else 1.0


def layer(job: Job, rates: Values, dense: bool = False) -> tuple[_Work, _Work]:
    """Forward and backward of one layer for one micro-batch; dense: of one without experts."""
    attention, scores = _attention(job, rates)
    width = _pass(job, rates, job.width(dense) / job.layout.tp)
    forward = _Work(
        products=_products(job, rates, dense),
        attention=attention,
        elementwise=_stream(job, rates, rates.elementwise) + job.matrices * width + scores,
        tensor=_tensor(job, rates),
        context=_context(job, rates),
        experts=0.0 if dense else _travel(job, rates),
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
    if "norms" in again:  # two of them, each read and written
        backward.elementwise += _stream(job, rates, 2 * 2 * NUMBER)
    if "ffn" in again:
        backward.elementwise += job.matrices * width
    both = _Work(
        launches=_launches(job, rates, forward.total + backward.total),
        tensor=rates.beyond * (ceil(job.layout.tp / job.machine.per_node) - 1),
    )
    return forward.plus(both, FORWARD), backward.plus(both, 1 - FORWARD)


def _products(job: Job, rates: Values, dense: bool) -> float:
    """Seconds of a layer's products: of queries, keys and values, of the output, of the network."""
    config, t, h = job.config, job.layout.tp, job.config.hidden
    taken = _product(job, rates, (h + 2 * job.heads) / t, h) + _product(job, rates, h, h / t)
    if dense or not config.experts:
        return taken + _network(job, rates, config.ffn_width)
    return taken + _experts(job, rates)


def _attention(job: Job, rates: Values) -> tuple[float, float]:
    """Seconds of attention's two products, and of passes over its scores, in a forward pass."""
    pairs = job.tokens * job.seq * job.config.hidden / job.layout.tp  # times their width
    if job.profile.attention == "flash":  # half of the pairs are masked, and left out
        return 2 * 2 * pairs / 2 / (rates.attention * job.machine.flops), 0.0
    scores = job.seq * job.config.heads / job.layout.tp
    passes = rates.scores * _pass(job, rates, scores)
    return 2 * 2 * pairs / (rates.products * job.machine.flops), passes


def _pass(job: Job, rates: Values, width: float) -> float:
    """Seconds in which a number is read or written for each token and `width`."""
    return NUMBER * job.tokens * width / (rates.memory * job.machine.stream)


def _stream(job: Job, rates: Values, size: float) -> float:
    """Seconds in which `size` bytes of the residual stream pass, for each token and width."""
    taken = size * job.tokens * job.config.hidden / job.sequence
    return taken / (rates.memory * job.machine.stream)


def _launches(job: Job, rates: Values, gpu: float) -> float:
    """Seconds more than the GPU's, softly, in which the CPU launches a layer."""
    cpu = _cpu(job, rates)
    return (gpu**SOFT + cpu**SOFT) ** (1 / SOFT) - gpu if cpu else 0.0


def _cpu(job: Job, rates: Values) -> float:
    """Seconds in which the CPU launches a layer, forward and backward."""
    layout = job.layout
    if job.captured:
        return 0.0
    crossing = layout.pp > 1 and job.nodes > 1
    cpu = rates.launch + (rates.crossing * (layout.tp - 1) if crossing else 0.0)
    return cpu * (1 + FORWARD) if layout.recompute == "full" else cpu


def pace(job: Job, rates: Values) -> float:
    """How long the GPU works on a layer, in the time that the CPU takes to launch it: over 1, the
    CPU runs ahead. Of what is not captured.
    """
    forward, backward = layer(job, rates)
    both = forward.plus(backward)
    return (both.total - both.launches) / _cpu(job, rates)


def _network(job: Job, rates: Values, width: float, rows: float | None = None) -> float:
    """Seconds of a feed-forward network's products, for so many rows; None: all tokens."""
    h, f = job.config.hidden, width / job.layout.tp
    wide = (job.matrices - 1) * f
    return _product(job, rates, wide, h, rows) + _product(job, rates, h, f, rows)


def _experts(job: Job, rates: Values) -> float:
    """Seconds of a rank's own experts, one after another, and of the shared ones.

    Each has to read its weights, however few tokens choose it; and the step waits for the fullest
    rank.
    """
    config, layout = job.config, job.layout
    here = config.experts // layout.ep
    rows = job.tokens * config.experts_per_token / here
    read = NUMBER * job.matrices * config.hidden * config.expert_width / layout.tp
    least = read / (rates.memory * job.machine.stream)
    own = here * max(least, _network(job, rates, config.expert_width, rows))
    shared = config.shared_experts * config.expert_width
    return rates.uneven * own + (_network(job, rates, shared) if shared else 0.0)


def _travel(job: Job, rates: Values) -> float:
    """Seconds of two all-to-alls: tokens go to their experts, and what these say comes back.

    Ranks that share experts stand as close as they can: in a node, where tensor and context ranks
    leave room. Of what leaves the node, each GPU has a card of its own.
    """
    layout, machine, e = job.layout, job.machine, job.layout.ep
    if e == 1:
        return 0.0
    sent = job.config.experts_per_token * job.stream / job.sequence / e  # to each of the ranks
    here = min(e, max(1, machine.per_node // (layout.tp * layout.cp)))
    inside = (here - 1) * sent / (rates.node * machine.inside)
    return 2 * max(inside, (e - here) * sent / (rates.network * machine.between))


def _product(
    job: Job, rates: Values, outputs: float, inputs: float, rows: float | None = None
) -> float:
    """Seconds of rows × inputs times inputs × outputs; None: as many rows as tokens."""
    rows = job.tokens if rows is None else rows
    taken = 2 * rows * outputs * inputs / (rates.products * job.flops)
    if job.profile.waves and job.machine.processors:
        taken *= A100 / (job.machine.best or A100)
        tiles = ceil(rows / TILE[0]) * ceil(outputs / TILE[1])
        taken *= ceil(tiles / job.machine.processors) * job.machine.processors / tiles
    return taken


def _tensor(job: Job, rates: Values) -> float:
    """Seconds of the tensor group's collectives in a layer's forward pass: two all-reduces."""
    t, machine = job.layout.tp, job.machine
    if t == 1:
        return 0.0
    rate = rates.node * machine.inside
    if t > machine.per_node:  # a ring over full nodes leaves each of them on every card
        rate = min(rate, rates.network * machine.between * machine.per_node)
    return 2 * 2 * (t - 1) / t * job.stream / rate


def _context(job: Job, rates: Values) -> float:
    """Seconds in which keys and values of a sequence's other ranks arrive, in a forward pass."""
    layout, c = job.layout, job.layout.cp
    if c == 1:
        return 0.0
    near = c * layout.tp <= job.machine.per_node
    rate = rates.node * job.machine.inside if near else rates.network * job.machine.between
    return (c - 1) * 2 * NUMBER * job.tokens * job.heads / layout.tp / rate


def _head(job: Job, rates: Values) -> _Work:
    """The output layer and the loss, forward and backward."""
    config, t = job.config, job.layout.tp
    products = (1 + BACKWARD) * _product(job, rates, config.vocab / t, config.hidden)
    logits = job.tokens * config.vocab / t
    passes = job.profile.loss * logits / (rates.memory * job.machine.stream)
    return _Work(products=products, elementwise=passes)


def _messages(job: Job, rates: Values) -> float:
    """Seconds of a step's messages between stages, there and back."""
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    far = job.nodes > 1
    rate = rates.network * job.machine.between if far else rates.node * job.machine.inside
    each = rates.message + job.stream / layout.tp / rate
    return 2 * layout.chunks * each * (layout.microbatches + layout.pp - 2)


def _optimizer(job: Job, rates: Values, stage: Stage) -> float:
    """Seconds in which gradients are added up and weights updated."""
    layout, profile = job.layout, job.profile
    held = job.held(stage)
    kept = held.shard(layout) if layout.zero else held.all
    read = profile.update * kept + profile.accumulate * held.all * layout.microbatches
    return rates.step + read / (rates.memory * job.machine.stream)
