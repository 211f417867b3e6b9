"""How many parameters a shape has: all of them, by part, and on one rank.

Read from the ledger (`shardlab.layout`), which says how each axis cuts a parameter. A vocabulary is
padded up to a multiple of the tensor degree; a tied head on another stage than the embedding is a
copy of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from shardlab.arguments import check_kind, check_whole, given
from shardlab.layout import ALONE, KINDS, Layout, Stage
from shardlab.layout.entries import (
    check_expert_degree,
    check_tensor_degree,
    held,
    of_kind,
)
from shardlab.shapes import Config

from .units import ceil_div

Shapes = dict[str, tuple[int, ...]]  # name of a parameter, as the model calls it -> its shape


def placed(config: Config, layout: Layout, stage: int | Stage | None = None) -> Stage:
    """The stage that is meant: by number; None: the last; or a `Stage`, which it returns.

    Raises ValueError unless the shape can be cut so across and along.
    """
    check_kind(Layout, layout=layout)
    check_tensor_degree(config, layout.tp)
    if isinstance(stage, Stage):
        return stage
    found = layout.parts(config)
    check_whole(0, layout.pp - 1, **given(stage=stage))
    return found[-1 if stage is None else stage]


def shapes(config: Config, layout: Layout = ALONE, stage: int | Stage | None = None) -> Shapes:
    """Every parameter that one rank holds, by name, once; `stage` as in `parameters`."""
    here = placed(config, layout, stage)
    check_expert_degree(config, layout.ep)
    return {entry.name: entry.local(layout.tp) for entry in held(config, here, layout.ep)}


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
    config: Config, layout: Layout = ALONE, stage: int | Stage | None = None
) -> dict[str, int]:
    """Parameters on one rank, by part: embedding, attention, ffn, norms, head.

    stage: which of the layout's, counted from 0; None: the last, which of equal ones has the most;
    or any `Stage`. Experts, of which a rank has its own, count as feed-forward networks. Raises
    ValueError for degrees that do not divide heads, key-value heads, the width of the feed-forward
    network or of an expert (tp), the layers (pp) or the experts (ep).
    """
    here = placed(config, layout, stage)
    check_expert_degree(config, layout.ep)
    return dict(held_by(config, layout, here).kinds)


def of_both_kinds(config: Config, here: Stage) -> list[tuple[bool, int]]:
    """How many layers of a stage have experts, and how many have none, as far as there are some."""
    sparse = here.layers - here.dense if config.experts else 0
    return [(s, n) for s, n in ((False, here.layers - sparse), (True, sparse)) if n]


def parameter_count(config: Config) -> int:
    """Parameters of the whole model; tied ones count once."""
    return sum(parameters(config).values())


def in_experts(config: Config, layout: Layout = ALONE, stage: int | Stage | None = None) -> int:
    """Of the `parameters`, those of the rank's experts, which other ranks lack."""
    here = placed(config, layout, stage)
    check_expert_degree(config, layout.ep)
    return held_by(config, layout, here).experts


@dataclass(frozen=True)
class Held:
    """Parameters of one rank."""

    all: int
    experts: int  # of these, its own experts'
    kinds: dict[str, int]  # all of them, by part

    def shard(self, layout: Layout) -> int:
        """Those of which ZeRO leaves the states on the rank: ranks that have the same divide them.

        All ranks of a group do, and of an expert an ep-th of these. Shards are rounded up.
        """
        shards = layout.shards
        same = self.all - self.experts
        return ceil_div(same, shards) + ceil_div(self.experts, shards // layout.ep)


def held_by(config: Config, layout: Layout, here: Stage) -> Held:
    """What a rank of a stage holds, by number alone: for a thousand layouts, and without checks."""
    ends = here.embedding, here.head
    return _held(config, layout.tp, layout.ep, here.layers, here.dense, *ends)


@lru_cache(maxsize=4096)
def _held(
    config: Config, tp: int, ep: int, layers: int, dense: int, embedding: bool, head: bool
) -> Held:
    here = Stage((range(layers),), embedding, head, dense)
    counts, own = dict.fromkeys(KINDS, 0), 0
    for entry in held(config, replace(here, chunks=()), ep):
        counts[entry.kind] += entry.elements(tp)
    for sparse, n in of_both_kinds(config, here):
        for kind, elements in in_layer(config, tp, ep, sparse).items():
            counts["ffn" if kind == "experts" else kind] += n * elements
            own += n * elements if kind == "experts" else 0
    return Held(sum(counts.values()), own, counts)


def largest_parameter(
    config: Config, layout: Layout = ALONE, stage: int | Stage | None = None
) -> int:
    """Elements of the largest single parameter on a rank."""
    return max(prod(shape) for shape in shapes(config, layout, stage).values())


def fsdp2_shard(config: Config, layout: Layout, stage: int | Stage | None = None) -> int:
    """Elements that the first rank holds when FSDP2 shards each parameter by its first dimension.

    The rows are rounded up (torch.chunk), so this is a little above an even share of them.
    """
    held = shapes(config, layout, stage).values()
    return sum(ceil_div(shape[0], layout.shards) * prod(shape[1:]) for shape in held)
