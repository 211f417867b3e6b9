"""The longest context whose training step fits into memory, predicted by the memory model.

With context parallelism over cp ranks, each rank has the activations of S / cp tokens and a full
copy of the weights. It also needs buffers for attention's messages, which are in flight while a
layer's attention is computed, and for the copy of the gradients that is all-reduced at the end.
`memory.estimate_step` covers everything else, and the effects of tensor and sequence parallelism.

A longer context adds the same bytes for each token, at every moment of the step, because no kernel
here keeps scores. So the longest context that fits is found by bisection.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from shardlab.common.shapes import Config
from shardlab.layout import SINGLE_RANK, Layout
from shardlab.memory import PRECISIONS, count_in_flight, estimate_step

from .predict import predict_attention_memory

METHODS = "ring", "ulysses"


def predict_context_moments(
    config: Config,
    layout: Layout,
    seq: int,
    method: str = "ring",
    precision: str = "bf16",
    device: str = "gpu",
    **choices: Any,
) -> dict[str, int]:
    """Return the bytes on one rank at each moment of a training step on contexts of `seq` tokens.

    layout: its cp ranks share a context. method: "ring" or "ulysses" attention. ZeRO shards over
    all dp * cp ranks that have the same weights. choices: arguments of `memory.estimate_step`
    (attention, optimizer, …). The largest value is the peak.

    seq: a multiple of `context_multiple`. With cp above 1, attention is fused, and dropout, window
    and latent attention are not allowed. Raises ValueError as `memory.estimate_step` does.
    """
    assert seq % context_multiple(layout) == 0, (seq, layout)
    cp, tp, batch = layout.cp, layout.tp, layout.micro_batch
    # First a rank with its part of the context alone; the communication buffers are added below.
    copies = layout.dp * cp if layout.zero else layout.dp
    alone = replace(layout, dp=copies, cp=1)
    found = estimate_step(config, alone, seq // cp, precision, device=device, **choices)
    moments = dict(found.moments)
    if cp == 1:
        return moments
    heads, kv_heads = config.heads // tp, config.key_value_heads // tp
    itemsize = PRECISIONS[precision].compute
    shape = heads, kv_heads, config.head_size
    one = predict_attention_memory("one", batch, seq // cp, *shape, 1, itemsize)
    cut = predict_attention_memory(method, batch, seq, *shape, cp, itemsize)
    one_head = batch * (seq // cp) * config.head_size * itemsize
    query, inputs = heads * one_head, (heads + 2 * kv_heads) * one_head
    # The bytes that a layer keeps beyond those of one process, where a CPU keeps attention's
    # output twice (heads first and tokens first) and a GPU once.
    kept = cut["kept"] - one["kept"] - (query if device == "cpu" and heads > 1 else 0)
    # The first pipeline stage has the most micro-batches in flight.
    layers = int(config.layers // layout.pp * count_in_flight(layout))
    if layout.recompute == "full":
        layers = 1
        computed_again = {"ffn", "norm"}
    else:
        computed_again = set(moments) - {"attention", "embedding", "step", "reduce", "forward"}
    for moment in computed_again:
        moments[moment] += layers * kept
    # During attention's own backward, this layer's outputs exist once in either case.
    moments["attention"] += (layers - 1) * kept + cut["backward"] - one["backward"]
    if method == "ulysses":
        moments["attention"] -= inputs  # the first all-to-all's inputs are no longer needed
    if not layout.zero:  # the flat copy of the gradients: see `average_gradients`
        states = found.parameters + found.gradients + found.optimizer
        moments["average"] = states + found.gradients + 16 * batch * (seq // cp)
    return moments


def context_multiple(layout: Layout) -> int:
    """Return the number of tokens of which the context length must be a multiple.

    The zig-zag layout needs 2 cp pieces; sequence parallelism divides a rank's tokens by tp.
    """
    pieces, shares = 2 if layout.cp > 1 else 1, layout.tp if layout.sequence_parallel else 1
    return layout.cp * math.lcm(pieces, shares)


def find_max_context(
    config: Config, budget: int, layout: Layout = SINGLE_RANK, method: str = "ring", **choices: Any
) -> int:
    """Return the most tokens of context with which a step needs at most `budget` bytes a rank.

    The result is a multiple of `context_multiple`, or 0 if not even the shortest context fits.
    choices: further arguments of `predict_context_moments`. Fragmentation, CUDA's context and
    NCCL's buffers are not counted: leave a tenth of the memory for them.
    """
    unit = context_multiple(layout)

    def fits_budget(units: int) -> bool:
        moments = predict_context_moments(config, layout, units * unit, method, **choices)
        return max(moments.values()) <= budget

    low, high = 0, 1  # `low` units fit; `high` units do not, once the loop has ended
    while fits_budget(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits_budget(middle) else (low, middle)
    return low * unit
