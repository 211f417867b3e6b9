"""Which layers stand on which stage, by rule or as given.

Blocks stand in the order embedding, layers, last norm and head. Rules:

    equal     the same number of layers on each stage, the embedding on the first, the head on the
              last; other numbers are refused
    megatron  embedding and head count as a layer each where the layers alone cannot be divided:
              126 layers on 16 stages are 7, 14 times 8, 7 (Llama 3 405B; arXiv 2407.21783,
              section 3.3.2)
    nanotron  a layer costs its weights, 4h² + 3hF as that library counts them, the head Vh, all
              else nothing; a stage ends with the block at which the running cost passes its share
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.shapes import Config

from .layout import Layout


@dataclass(frozen=True)
class Stage:
    """What stands on one stage."""

    layers: int
    embedding: bool
    head: bool


def stages(config: Config, layout: Layout) -> list[Stage]:
    """The `layout.pp` stages of `config`, first to last.

    Raises ValueError where the layers cannot be divided so, and where those given do not add up.
    """
    p, rule = layout.pp, layout.stages
    if rule == "nanotron":
        return _by_cost(config, p)
    if rule == "megatron":
        layers = _with_ends(config.layers, p)
    elif rule == "equal":
        if config.layers % p:
            raise ValueError(f"pp={p}: allowed are divisors of layers={config.layers}")
        layers = [config.layers // p] * p
    else:
        layers = list(rule)
        if sum(layers) != config.layers:
            raise ValueError(f"stages={rule}: allowed are those with {config.layers} layers in all")
    return [Stage(n, k == 0, k == p - 1) for k, n in enumerate(layers)]


def _with_ends(layers: int, p: int) -> list[int]:
    """Equal where it can be; else with a layer's place for each end, as evenly as it goes."""
    if layers % p == 0:
        return [layers // p] * p
    if p > layers + 2:
        raise ValueError(f"pp={p}: allowed are 1 to {layers + 2}, for {layers} layers")
    each, more = divmod(layers + 2, p)
    counts = [each] * p
    for k in range(more):  # the stages behind the first keep fewer micro-batches, and take them
        counts[1 + k if p > more else k] += 1
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _by_cost(config: Config, p: int) -> list[Stage]:
    h, f = config.hidden, config.ffn_width
    layer, head = 4 * h * h + 3 * h * f, config.vocab * h
    total = config.layers * layer + head
    found: list[list[int]] = [[] for _ in range(p)]  # costs of the blocks of each stage
    stage = cost = 0
    for block in [layer] * config.layers + [head]:
        found[stage].append(block)
        cost += block
        if stage < p - 1 and cost * p >= total * (stage + 1):
            stage += 1
    counts = [len(blocks) for blocks in found]
    last = stage if found[stage] else stage - 1  # a head that ends a stage is followed by the loss
    counts[last] -= 1
    return [Stage(n, k == 0, k == last) for k, n in enumerate(counts)]
