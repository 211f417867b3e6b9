"""How many tokens fit: the longest context that a training step has room for, by the memory model.

Cut over cp ranks (context parallelism), each rank has the activations of S / cp tokens and all
weights of its own. What comes on top: attention's messages, which are in flight while a layer's
attention is computed, and the gradients' copy that is summed over the ranks at the end. Everything
else is `memory.estimate`, and so is what tensor and sequence parallelism divide.

Growing the context adds the same bytes for each token, at every moment of the step: no kernel here
keeps scores. So the longest context that fits is found by bisection.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from shardlab.common.shapes import Config
from shardlab.layout import ALONE, Layout
from shardlab.memory import PRECISIONS, estimate, in_flight

from .predict import attention_memory

WAYS = "ring", "ulysses"


def context_moments(
    config: Config,
    layout: Layout,
    seq: int,
    way: str = "ring",
    precision: str = "bf16",
    device: str = "gpu",
    **choices: Any,
) -> dict[str, int]:
    """Bytes on one rank at each moment of a training step on contexts of `seq` tokens.

    layout: whose cp ranks share a context. way: how attention reaches the other ranks' keys, "ring"
    or "ulysses". ZeRO is over all ranks that have the same weights, d * c of them. choices: of
    `memory.estimate` (attention, optimizer, …). The largest value is the peak.

    seq: a multiple of `grain`. With cp above 1 `distribute` takes no dropout, window or latents,
    and attention is fused. Raises ValueError as `memory.estimate` does.
    """
    assert seq % grain(layout) == 0, (seq, layout)
    cp, tp, batch = layout.cp, layout.tp, layout.micro_batch
    # Each rank by itself, with its part of the context; what it does with others comes on top.
    copies = layout.dp * cp if layout.zero else layout.dp
    alone = replace(layout, dp=copies, cp=1)
    found = estimate(config, alone, seq // cp, precision, device=device, **choices)
    moments = dict(found.moments)
    if cp == 1:
        return moments
    heads, kv_heads = config.heads // tp, config.key_value_heads // tp
    itemsize = PRECISIONS[precision].compute
    shape = heads, kv_heads, config.head_size
    one = attention_memory("one", batch, seq // cp, *shape, 1, itemsize)
    cut = attention_memory(way, batch, seq, *shape, cp, itemsize)
    one_head = batch * (seq // cp) * config.head_size * itemsize
    query, inputs = heads * one_head, (heads + 2 * kv_heads) * one_head
    # What a layer keeps in other ways than in one process, where a CPU keeps attention's results
    # twice, heads first and tokens first, and a GPU once.
    kept = cut["kept"] - one["kept"] - (query if device == "cpu" and heads > 1 else 0)
    # As the first stage of a pipeline has them.
    layers = int(config.layers // layout.pp * in_flight(layout))
    if layout.recompute == "full":
        layers = 1
        computed_again = {"ffn", "norm"}
    else:
        computed_again = set(moments) - {"attention", "embedding", "step", "reduce", "forward"}
    for moment in computed_again:
        moments[moment] += layers * kept
    # In backward of attention itself this layer's results are there once in either case.
    moments["attention"] += (layers - 1) * kept + cut["backward"] - one["backward"]
    if way == "ulysses":
        moments["attention"] -= inputs  # of the first all-to-all: nobody needs them any more
    if not layout.zero:  # the gradients side by side in one message: see `average_gradients`
        states = found.parameters + found.gradients + found.optimizer
        moments["average"] = states + found.gradients + 16 * batch * (seq // cp)
    return moments


def grain(layout: Layout) -> int:
    """Contexts have a multiple of so many tokens: two pieces for each of cp ranks, t equal shares.

    Of both ways to deal out tokens the stricter, the zig-zag.
    """
    pieces, shares = 2 if layout.cp > 1 else 1, layout.tp if layout.sequence_parallel else 1
    return layout.cp * math.lcm(pieces, shares)


def tokens_that_fit(
    config: Config, budget: int, layout: Layout = ALONE, way: str = "ring", **choices: Any
) -> int:
    """The longest context, in tokens, whose training step stays within `budget` bytes on each rank.

    A multiple of `grain`; 0 when not even the shortest fits, as when the states alone are too
    large. choices: of `context_moments` (precision, device) and of `memory.estimate`. Not in it is
    what that does not count: fragments, CUDA's context, buffers of nccl. Leave a tenth for them.
    """
    unit = grain(layout)

    def fits(units: int) -> bool:
        moments = context_moments(config, layout, units * unit, way, **choices)
        return max(moments.values()) <= budget

    low, high = 0, 1  # so many units fit; so many do not
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit
