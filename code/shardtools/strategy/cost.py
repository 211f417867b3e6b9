"""The cost of a layout: arithmetic, traffic, and a lower bound on the step time in seconds.

P parameters, L layers, h hidden, s tokens of a sequence, b sequences of a micro-batch, m
micro-batches, d data-parallel copies, t and p tensor and pipeline degrees, e bytes an element.

    arithmetic  6 operations per token and matrix weight, and 6 L s h per token for attention;
                full recomputation repeats the layers' forward pass: 8 instead of 6
    tensor      4 all-reduces of bshe per layer and micro-batch, 6 with recomputation; each
                sends 2(t-1)/t of its bytes
    bubble      (p-1)/m of the longer of these two; (p-1)/(vm) with v interleaved chunks
    data        `zero_traffic`, between the data-parallel copies
    messages    2 bshe per micro-batch, from each stage to the next

Sources: Narayanan et al. 2021 (arXiv 2104.04473), sections 2.2, 3.2, 5.1 and appendix; Shoeybi et
al. 2019 (arXiv 1909.08053), section 3; Rajbhandari et al. 2020 (arXiv 1910.02054), section 7.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlab import memory
from shardlab.common.arguments import check_integer
from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Stage, Structure, get_structure
from shardlab.layout.core import parse_recompute
from shardlab.layout.structure import LayerKind, check_expert_degree, check_tensor_degree
from shardlab.memory.units import ceil_div

ELEMENT_BYTES = 2  # bytes: activations, weights and gradients travel in 16 bits
SECONDS_PER_DAY = 86_400.0


def count_flops(
    config: Config | Structure,
    tokens: int,
    seq: int | None = None,
    recompute: str = "none",
    causal: bool = True,
) -> int:
    """Return the floating-point operations of a step on `tokens` tokens, on all GPUs together.

    causal: attention skips the pairs that the mask hides, half of all pairs; papers count all
    pairs, as Narayanan et al. do: 96 B s L h² (1 + s/6h + V/16Lh) with full recomputation.
    """
    model = get_structure(config)
    seq = model.seq if seq is None else seq
    again, twice = parse_recompute(recompute), recompute == "full"  # a 4th pass: forward again
    passes = 3 + twice, 3 + (twice or "attention" in again)
    per_token = 6.0 * model.vocab * model.hidden
    for kind, layers in zip(
        model.kinds, model.count_kinds((range(len(model.layer_kinds)),)), strict=True
    ):
        core = kind.core.count_flops(seq, causal) if kind.core else 0.0
        if "latents" in again:
            per_token += layers * 2 * sum(one.inputs * one.outputs for one in kind.up_projections)
        work = 2 * _count_matrix_elements(kind) + kind.extra_flops
        per_token += layers * (passes[0] * work + passes[1] * core)
    return round(tokens * per_token)


def _count_matrix_elements(kind: LayerKind) -> int:
    """Count the elements of a layer's matrices that one token uses: k experts, not all."""
    chosen = kind.routed.top_k if kind.routed else 0
    return sum((chosen if p.is_expert else 1) * p.inputs * p.outputs for p in kind.matrix_products)


def zero_traffic(
    params: int,
    zero: int,
    dp: int,
    microbatches: int = 1,
    weight: int = ELEMENT_BYTES,
    gradient: int = ELEMENT_BYTES,
) -> dict[str, int]:
    """Return the bytes that a rank sends to the other copies in one step, by purpose.

    params: parameters that the rank would hold without ZeRO. weight, gradient: bytes per element.
    With G and W the bytes of all gradients and weights, each entry times (d-1)/d:

        stage   gradients   weights
        0       2 G                     one all-reduce
        1       G           W           the same bytes: reduce-scatter, then all-gather
        2       m G         W           a reduce-scatter of gradients in each micro-batch
        3       m G         2 m W       and all-gathers of weights, for forward and backward

    So stage 1 costs as much as stage 0; stages 2 and 3 multiply by the m micro-batches that a
    pipeline needs. Parameters outside of the layers count alike, though stage 3 may keep them
    gathered.
    """
    m = microbatches
    others = ceil_div(params, dp) * (dp - 1)
    gradients, weights = {0: (2, 0), 1: (1, 1), 2: (m, 1), 3: (m, 2 * m)}[zero]
    return {"gradients": gradients * others * gradient, "weights": weights * others * weight}


@dataclass(frozen=True)
class Floor:
    """Lower bounds on the parts of one step, in seconds."""

    arithmetic: float
    tensor: float  # all-reduces inside layers: products of other micro-batches can hide them
    bubble: float
    data: float  # between the data-parallel copies
    messages: float  # between pipeline stages

    @property
    def total(self) -> float:
        """Lower bound on the step time: everything that arithmetic can hide is hidden."""
        return max(max(self.arithmetic, self.tensor) + self.bubble, self.data, self.messages)


def compute_floor(
    config: Config | Structure,
    machine: Machine,
    layout: Layout,
    seq: int | None = None,
    causal: bool = True,
) -> Floor:
    """Return a lower bound on the step time: full data-sheet rates, full links, no latency.

    Real steps take about twice as long: products do not reach the data sheet's rate, norms, masks
    and additions are not counted, and not all traffic is hidden. `predict` estimates the real time.

    Copies on one node reduce gradients there first, and share the node's links to other nodes: each
    of g copies sends a g-th. Tensor-parallel ranks share a node if they fit there; a larger
    ring leaves each node on every network card. Unequal stages wait for the slowest, so that the
    bound of equal stages holds for them, too. Traffic of experts is assumed to be hidden.

    Raises ValueError for a model that cannot be divided so.
    """
    seq = config.seq if seq is None else seq
    check_integer(seq=seq)
    stages = layout.build_stages(config)
    check_tensor_degree(config, layout.tp, copies=True)
    check_expert_degree(config, layout.ep)
    work = count_flops(config, layout.global_batch * seq, seq, layout.recompute, causal)
    arithmetic = work / (layout.world_size * machine.flops)

    tokens = layout.micro_batch * seq * layout.microbatches / layout.cp
    stream = tokens * config.hidden * ELEMENT_BYTES
    reduces = (
        (6 if layout.recompute == "full" else 4)
        * len(get_structure(config).layer_kinds)
        / layout.pp
    )
    near = machine.node_bandwidth
    if layout.tp > machine.gpus_per_node:
        near = min(near, machine.network_bandwidth * machine.gpus_per_node)
    tensor = reduces * 2 * (layout.tp - 1) / layout.tp * stream / near
    bubble = bubble_ratio(layout) * max(arithmetic, tensor)

    messages = 0.0
    if layout.pp > 1:
        one_node = layout.world_size <= machine.gpus_per_node
        link = machine.node_bandwidth if one_node else machine.network_bandwidth
        messages = 2 * layout.chunks * stream / layout.tp / link
    data = _data_seconds(config, machine, layout, stages)
    return Floor(arithmetic, tensor, bubble, data, messages)


def bubble_ratio(layout: Layout) -> float:
    """Return the bubble over the rest of the step; a backward pass takes twice its forward."""
    p, m = layout.pp, layout.microbatches
    if layout.schedule == "naive":
        return p - 1
    if layout.schedule in ("zb-h2", "zb-v"):
        return 0.0
    return (p - 1) / (layout.chunks * m) / (3 if layout.schedule == "zb-h1" else 1)


def _data_seconds(
    config: Config | Structure, machine: Machine, layout: Layout, stages: list[Stage]
) -> float:
    held = [sum(memory.count_rank_parameters(config, layout, stage).values()) for stage in stages]
    group, replicas = layout.zero_degree, layout.replicas
    sent = sum(zero_traffic(max(held), layout.zero, group, layout.microbatches).values())
    seconds = _ring_seconds(machine, sent * group / max(1, group - 1), group, layout.tp)
    if replicas > 1:  # HSDP: each rank all-reduces its gradient shard with the other groups
        shard = 2 * ELEMENT_BYTES * ceil_div(max(held), group)
        seconds = max(seconds, _ring_seconds(machine, shard, replicas, layout.tp * group))
    return seconds


def _ring_seconds(machine: Machine, volume: float, ranks: int, stride: int) -> float:
    """Return the seconds to send `volume` (n-1)/n bytes around n ranks, `stride` GPUs apart."""
    here = min(ranks, max(1, machine.gpus_per_node // stride))  # ranks in one node
    nodes = ceil_div(ranks, here)
    inside = (here - 1) / here * volume / machine.node_bandwidth
    return max(inside, (nodes - 1) / nodes * volume / here / machine.network_bandwidth)


def training_days(params: float, tokens: float, gpus: int, flops: float) -> float:
    """Return the days of a training run: 8TP/(nX) seconds, with full recomputation.

    T tokens, P parameters, n GPUs that reach X = `flops` FLOP/s each. Narayanan et al. 2021,
    section 5.1: 34 days for 175 billion parameters and 300 billion tokens on 1,024 GPUs
    at 140 TFLOP/s.
    """
    return 8 * params * tokens / (gpus * flops) / SECONDS_PER_DAY
