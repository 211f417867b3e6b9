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

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from shardlab.layout import Layout, Stage
from shardlab.layout.core import computed_again
from shardlab.machines import MACHINES

from .job import Job, dealt, parameters, sharded

SOFT = 6  # of the longer of two: (x^6 + y^6)^(1/6), 12 % above where they are equal
TILE = 128, 256  # of a product's output, which one multiprocessor computes


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


def seconds(job: Job, rates: Mapping[str, float], reserved: float = 0.0) -> Seconds:
    """Seconds of one step; `reserved` bytes of rank 0 decide about retries.

    Raises ValueError for layers that the stages cannot share.
    """
    layout = job.layout
    m, v = layout.microbatches, layout.chunks
    forward, backward = layer(job, rates)
    each, head = forward.plus(backward), _head(job, rates)
    plain = _Work().plus(*layer(job, rates, dense=True)) if job.config.dense_layers else each
    found = layout.parts(job.config)
    work = [
        _Work().plus(each, stage.layers - stage.dense).plus(plain, stage.dense)
        .plus(head, stage.head)
        for stage in found
    ]  # fmt: skip
    slowest = max(work, key=lambda stage: stage.total)
    others = sum(stage.total for stage in work) - slowest.total
    if layout.schedule == "naive":
        bubble = (m * others) if layout.pp > 1 else 0.0
    else:
        bubble = others * _left(layout, forward.total, backward.total, backward.products / 2) / v
    fullest = max(found, key=lambda stage: parameters(job, stage))
    busy = slowest.total * m
    first = forward.total * fullest.layers  # what hides the weights that come for it
    data, step = _copies(job, rates, fullest, busy, first), _optimizer(job, rates, fullest)
    messages = _messages(job, rates)
    total = busy + bubble + messages + data + step
    # Predicted bytes are not exact: some runs retry from 0.97 of the limit on, all above 1.11.
    full = reserved / (rates["limit"] * job.machine.memory)
    likely = min(1.0, max(0.0, (full - 0.97) / 0.14))
    retries = total * (rates["retries"] ** likely - 1)
    parts = {name: m * value for name, value in vars(slowest).items()}
    return Seconds(**parts, bubble=bubble, messages=messages, data=data, optimizer=step,
                   retries=retries)  # fmt: skip


def _left(layout: Layout, forward: float, backward: float, weights: float) -> float:
    """The share of 1F1B's bubble that a schedule leaves: Qi et al. 2023 (arXiv 2401.10241).

    weights: what of backward can wait, and fills: once, or twice where more micro-batches begin
    early; and no more than there is, one for each micro-batch but the last.
    """
    fills = {"zb-h1": 1, "zb-h2": 2, "zb-v": 2}.get(layout.schedule, 0)
    filled = min(fills, (layout.microbatches - 1) / max(1, layout.pp - 1)) * weights
    return max(0.0, 1 - (weights + filled) / (forward + backward)) if fills else 1.0


def layer(job: Job, rates: Mapping[str, float], dense: bool = False) -> tuple[_Work, _Work]:
    """Forward and backward of one layer for one micro-batch; dense: of one without experts."""
    config, machine, layout = job.config, job.machine, job.layout
    t, h, f = layout.tp, config.hidden, job.width(dense)
    products = _product(job, rates, (h + 2 * job.heads) / t, h) + _product(job, rates, h, h / t)
    if dense or not config.experts:
        products += _network(job, rates, config.ffn_width)
    else:
        products += _experts(job, rates)
    bandwidth = rates["memory"] * machine.stream
    pairs = job.tokens * job.seq * h / t  # of a query and a key, times their width
    if job.profile.attention == "plain":
        attention = 4 * pairs / (rates["products"] * machine.flops)
        scores = job.tokens * job.seq * config.heads / t
        core = rates["scores"] * 2 * scores / bandwidth
        more = 2.0
    else:  # half of the pairs are masked, and left out; backward computes scores again
        attention = 2 * pairs / (rates["attention"] * machine.flops)
        core, more = 0.0, 2.5
    outside = rates["elementwise"] * job.tokens * h / job.sequence
    inside = (6 if config.mlp == "swiglu" else 4) * job.tokens * f / t
    elementwise = (outside + inside) / bandwidth
    tensor = _tensor(job, rates)
    context = _context(job, rates)
    travel = 0.0 if dense else _travel(job, rates)
    forward = _Work(products, attention, elementwise + core, 0.0, tensor, context, travel)
    # Where the stream is cut as well, a gradient is gathered before anything can be computed.
    waits = 1 - min(1.0, rates["hidden"]) + (0.5 if job.sequence > 1 else 0.0)
    backward = _Work(
        2 * products, more * attention, 2 * (elementwise + core), 0.0, waits * tensor, 2 * context,
        travel,
    )  # fmt: skip

    again = computed_again(layout.recompute)
    if layout.recompute == "full":
        backward = backward.plus(forward)
    if "attention" in again:
        backward = backward.plus(_Work(attention=attention, elementwise=core))
    passes = 8 * job.tokens * h / job.sequence * ("norms" in again)  # two norms, read and written
    backward.elementwise += (passes + inside * ("ffn" in again)) / bandwidth
    crossing = layout.pp > 1 and job.nodes > 1
    launch = rates["launch"] + (rates["crossing"] * (t - 1) if crossing else 0.0)
    gpu, cpu = forward.total + backward.total, launch * (4 / 3 if layout.recompute == "full" else 1)
    cpu = 0.0 if job.captured else cpu
    longer = (gpu**SOFT + cpu**SOFT) ** (1 / SOFT) - gpu
    beyond = rates["beyond"] * (ceil(t / machine.per_node) - 1)
    ends = _Work(launches=longer, tensor=beyond)
    return forward.plus(ends, 1 / 3), backward.plus(ends, 2 / 3)


def _network(
    job: Job, rates: Mapping[str, float], width: float, rows: float | None = None
) -> float:
    """Seconds of a feed-forward network's products, for so many rows; None: all tokens."""
    h, f = job.config.hidden, width / job.layout.tp
    wide = (job.matrices - 1) * f
    return _product(job, rates, wide, h, rows) + _product(job, rates, h, f, rows)


def _experts(job: Job, rates: Mapping[str, float]) -> float:
    """Seconds of a rank's own experts, one after another, and of the shared ones.

    Each has to read its weights, however few tokens choose it; and the step waits for the fullest
    rank.
    """
    config, layout = job.config, job.layout
    here = config.experts // layout.ep
    rows = job.tokens * config.experts_per_token / here
    read = 2 * job.matrices * config.hidden * config.expert_width / layout.tp
    least = read / (rates["memory"] * job.machine.stream)
    own = here * max(least, _network(job, rates, config.expert_width, rows))
    shared = config.shared_experts * config.expert_width
    return rates["uneven"] * own + (_network(job, rates, shared) if shared else 0.0)


def _travel(job: Job, rates: Mapping[str, float]) -> float:
    """Seconds of two all-to-alls: tokens go to their experts, and what these say comes back.

    Ranks that share experts stand as close as they can: in a node, where tensor and context ranks
    leave room. Of what leaves the node, each GPU has a card of its own.
    """
    layout, machine, e = job.layout, job.machine, job.layout.ep
    if e == 1:
        return 0.0
    sent = job.config.experts_per_token * job.stream / job.sequence / e  # to each of the ranks
    here = min(e, max(1, machine.per_node // (layout.tp * layout.cp)))
    inside = (here - 1) * sent / (rates["node"] * machine.inside)
    return 2 * max(inside, (e - here) * sent / (rates["network"] * machine.between))


def _product(
    job: Job, rates: Mapping[str, float], outputs: float, inputs: float, rows: float | None = None
) -> float:
    """Seconds of rows × inputs times inputs × outputs; None: as many rows as tokens.

    Megatron's rate was found on A100s: another chip reaches it in the measure of its best product.
    """
    rows = job.tokens if rows is None else rows
    taken = 2 * rows * outputs * inputs / (rates["products"] * job.flops)
    if job.profile.waves and job.machine.processors:
        a100 = MACHINES["a100"].best
        taken *= a100 / (job.machine.best or a100)
        tiles = ceil(rows / TILE[0]) * ceil(outputs / TILE[1])
        taken *= ceil(tiles / job.machine.processors) * job.machine.processors / tiles
    return taken


def _tensor(job: Job, rates: Mapping[str, float]) -> float:
    """Seconds of the tensor group's collectives in a layer's forward pass: two all-reduces."""
    t, machine = job.layout.tp, job.machine
    if t == 1:
        return 0.0
    rate = rates["node"] * machine.inside
    if t > machine.per_node:  # a ring over full nodes leaves each of them on every card
        rate = min(rate, rates["network"] * machine.between * machine.per_node)
    return 4 * (t - 1) / t * job.stream / rate


def _context(job: Job, rates: Mapping[str, float]) -> float:
    """Seconds in which keys and values of a sequence's other ranks arrive, in a forward pass."""
    layout, c = job.layout, job.layout.cp
    if c == 1:
        return 0.0
    near = c * layout.tp <= job.machine.per_node
    rate = rates["node"] * job.machine.inside if near else rates["network"] * job.machine.between
    return (c - 1) * 2 * 2 * job.tokens * job.heads / layout.tp / rate


def _head(job: Job, rates: Mapping[str, float]) -> _Work:
    """The output layer and the loss, forward and backward."""
    config, t = job.config, job.layout.tp
    products = 3 * _product(job, rates, config.vocab / t, config.hidden)
    logits = job.tokens * config.vocab / t
    passes = job.profile.loss * logits / (rates["memory"] * job.machine.stream)
    return _Work(products=products, elementwise=passes)


def _messages(job: Job, rates: Mapping[str, float]) -> float:
    """Seconds of a step's messages between stages, there and back."""
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    far = job.nodes > 1
    rate = rates["network"] * job.machine.between if far else rates["node"] * job.machine.inside
    each = rates["message"] + job.stream / layout.tp / rate
    return 2 * layout.chunks * each * (layout.microbatches + layout.pp - 2)


def _copies(job: Job, rates: Mapping[str, float], stage: Stage, busy: float, first: float) -> float:
    """Seconds in which the copies wait for gradients and weights, and tied ends for each other.

    Of unsharded gradients backward hides a share, and of scattered ones the same; weights of ZeRO-1
    and 2 are gathered when the step is over, or ahead of each layer of the next forward pass. That,
    and what is sent for each micro-batch, from ZeRO-2 on, or 3 where there are stages, can hide
    behind the work, but for a share, and for what takes longer. busy: the step's; first: seconds of
    a micro-batch's forward pass.
    """
    layout, machine = job.layout, job.machine
    gradient, weight = job.profile.wire
    seconds = 0.0
    group, replicas, m = layout.shards, layout.replicas, layout.microbatches
    own = dealt(job, stage)
    if group > 1:
        once = (parameters(job, stage) - own) * (group - 1) / group / _rate(job, rates, group)
        if own and group > layout.ep:  # the ranks that have the same experts
            some = group // layout.ep
            once += own * (some - 1) / some / _rate(job, rates, some, layout.ep)
        after = weight * once
        if job.profile.ahead:
            after = max(rates["gathers"] * after, after - first)
        if layout.zero == 0:
            seconds = 2 * gradient * rates["exposed"] * once
        elif layout.zero == 1 or (layout.zero == 2 and layout.pp > 1):  # stages add up first
            reduced = 2 * gradient if job.profile.reduced else gradient * rates["exposed"]
            seconds = reduced * once + after
        else:  # for each micro-batch, and for the weights of ZeRO-2 once
            sent = m * (gradient + (2 * weight if layout.zero == 3 else 0)) * once
            calls = m * (3 if layout.zero == 3 else 1) * job.config.layers / layout.pp
            sent += calls * rates["hop"] * (ceil(group / _near(job)) - 1)
            seconds = max(rates["gathers"] * sent, sent - busy)
            seconds += after if layout.zero == 2 else 0.0
    if replicas > 1:  # groups add up the shards of their gradients, each rank with its like
        share = sharded(job, stage) * (replicas - 1) / replicas
        seconds += 2 * gradient * rates["exposed"] * share / _rate(job, rates, replicas, group)
    if job.config.tied and layout.pp > 1:
        ends = job.config.vocab * job.config.hidden / layout.tp
        seconds += 2 * gradient * ends / (rates["network"] * machine.between)
    return seconds


def _rate(job: Job, rates: Mapping[str, float], ranks: int, apart: int = 1) -> float:
    """Bytes per second between `ranks` copies, each `apart` copies from the next.

    Copies of one node share its cards: of g of them, each carries a g-th.
    """
    machine = job.machine
    here = min(ranks, _near(job, apart))
    rate = rates["node"] * machine.inside
    if ranks > here:
        rate = min(rate, rates["network"] * machine.between * here)
    return rate


def _near(job: Job, apart: int = 1) -> int:
    """Copies of a node, of those that are `apart` copies from each other."""
    return max(1, job.machine.per_node // (job.layout.tp * apart))


def _optimizer(job: Job, rates: Mapping[str, float], stage: Stage) -> float:
    """Seconds in which gradients are added up and weights updated."""
    layout, profile = job.layout, job.profile
    held = parameters(job, stage)
    kept = sharded(job, stage) if layout.zero else held
    read = profile.update * kept + profile.accumulate * held * layout.microbatches
    return rates["step"] + read / (rates["memory"] * job.machine.stream)
