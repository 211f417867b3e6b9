"""How many parameters a shape has: all of them, by part, and on one rank.

Read from the ledger (`shardlab.layout`), which says how each axis cuts a parameter. A vocabulary is
padded up to a multiple of the tensor degree; a tied head on another stage than the embedding is a
copy of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import prod

from shardlab.arguments import check_count, check_kind, check_whole, given
from shardlab.layout import KINDS, Stage, stages
from shardlab.layout.entries import (
    check_expert_degree,
    check_tensor_degree,
    held,
    of_kind,
)
from shardlab.shapes import Config

from .units import ceil_div

Shapes = dict[str, tuple[int, ...]]  # name of a parameter, as the model calls it -> its shape


def placed(
    config: Config,
    tp: int = 1,
    pp: int = 1,
    stage: int | Stage | None = None,
    rule: str | tuple[int, ...] = "equal",
    schedule: str = "1f1b",
    chunks: int | None = None,
) -> Stage:
    """The stage that is meant: one of `pp`, by number; the last; or a `Stage`, which it returns.

    Raises ValueError unless the shape can be cut `tp` ways across and `pp` ways along.
    """
    check_tensor_degree(config, tp)
    check_count(pp=pp)
    if isinstance(stage, Stage):
        return stage
    found = stages(config, pp, rule, schedule, chunks)
    check_whole(0, pp - 1, **given(stage=stage))
    return found[-1 if stage is None else stage]


def shapes(
    config: Config, tp: int = 1, pp: int = 1, stage: int | Stage | None = None, ep: int = 1
) -> Shapes:
    """Every parameter that one rank holds, by name, once; `stage` and `ep` as in `parameters`."""
    here = placed(config, tp, pp, stage)
    check_expert_degree(config, ep)
    return {entry.name: entry.local(tp) for entry in held(config, here, ep)}


@lru_cache(maxsize=1024)
def in_layer(config: Config, tp: int, ep: int, sparse: bool) -> Counter[str]:
    """Parameters of one layer of that kind on one rank, by part; "experts": of its own ones."""
    counts: Counter[str] = Counter()
    for entry in of_kind(config, sparse):
        own = entry.expert is not None
        times = config.experts // ep if own else 1
        counts["experts" if own else entry.kind] += times * entry.elements(tp)
    return counts


def parameters(
    config: Config, tp: int = 1, pp: int = 1, stage: int | Stage | None = None, ep: int = 1
) -> dict[str, int]:
    """Parameters on one rank, by part: embedding, attention, ffn, norms, head.

    stage: which of `pp` equal stages, counted from 0; None: the one with the most, which is the
    last; or any `Stage`. ep: ranks that deal out the experts, which count as feed-forward networks.
    Raises ValueError for degrees that do not divide heads, key-value heads, the width of the
    feed-forward network or of an expert (tp), the layers (pp) or the experts (ep).
    """
    here = placed(config, tp, pp, stage)
    check_expert_degree(config, ep)
    counts = dict.fromkeys(KINDS, 0)
    for entry in held(config, replace(here, chunks=()), ep):
        counts[entry.kind] += entry.elements(tp)
    for sparse, layers in of_both_kinds(config, here):
        for kind, elements in in_layer(config, tp, ep, sparse).items():
            counts["ffn" if kind == "experts" else kind] += layers * elements
    return counts


def of_both_kinds(config: Config, here: Stage) -> list[tuple[bool, int]]:
    """How many layers of a stage have experts, and how many have none, as far as there are some."""
    sparse = here.layers - here.dense if config.experts else 0
    return [(s, n) for s, n in ((False, here.layers - sparse), (True, sparse)) if n]


def parameter_count(config: Config) -> int:
    """Parameters of the whole model; tied ones count once."""
    return sum(parameters(config).values())


def in_experts(config: Config, tp: int = 1, *, stage: Stage, ep: int = 1) -> int:
    """Of the parameters of a rank of `stage`, those of its experts, which other ranks lack."""
    check_kind(Config, config=config)
    check_kind(Stage, stage=stage)
    check_tensor_degree(config, tp)
    check_expert_degree(config, ep)
    return sum(n * in_layer(config, tp, ep, s)["experts"] for s, n in of_both_kinds(config, stage))


def largest_parameter(
    config: Config, tp: int = 1, pp: int = 1, stage: int | Stage | None = None
) -> int:
    """Elements of the largest single parameter on a rank."""
    return max(prod(shape) for shape in shapes(config, tp, pp, stage).values())


def fsdp2_shard(
    config: Config, dp: int, tp: int = 1, pp: int = 1, stage: int | Stage | None = None
) -> int:
    """Elements that rank 0 of `dp` holds when FSDP2 shards each parameter by its first dimension.

    The rows are rounded up (torch.chunk), so this is a little above a `dp`-th of them.
    """
    check_count(dp=dp)
    held = shapes(config, tp, pp, stage).values()
    return sum(ceil_div(shape[0], dp) * prod(shape[1:]) for shape in held)
