"""How many parameters a shape has: all of them, by part, and on one rank.

Read from the ledger (`shardlab.layout`), which says how each axis cuts a parameter. A vocabulary is
padded up to a multiple of the tensor degree; a tied head on another stage than the embedding is a
copy of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from shardlab.common.arguments import check_whole, given
from shardlab.common.shapes import Config
from shardlab.layout import ALONE, KINDS, Layout, Stage, Structure, structure
from shardlab.layout.entries import Entry
from shardlab.layout.stages import held
from shardlab.layout.structure import Kind, check_expert_degree, check_tensor_degree

from .units import ceil_div

Shapes = dict[str, tuple[int, ...]]  # name of a parameter, as the model calls it -> its shape


def placed(config: Config | Structure, layout: Layout, stage: int | Stage | None = None) -> Stage:
    """The stage that is meant: by number; None: the last; or a `Stage`, which it returns.

    Raises ValueError unless the shape can be cut so across and along.
    """
    check_tensor_degree(config, layout.tp, copies=True)
    if isinstance(stage, Stage):
        return stage
    found = layout.parts(config)
    check_whole(0, layout.pp - 1, **given(stage=stage))
    return found[-1 if stage is None else stage]


def shapes(config: Config, layout: Layout = ALONE, stage: int | Stage | None = None) -> Shapes:
    """Every parameter that one rank holds, by name, once; `stage` as in `parameters`."""
    here = placed(config, layout, stage)
    check_expert_degree(config, layout.ep)
    return {
        entry.name: entry.local(layout.tp if entry.expert is None else layout.cut)
        for entry in held(config, here, layout.ep)
    }


@lru_cache(maxsize=1024)
def in_layer(kind: Kind, tp: int, ep: int, cut: int) -> Counter[str]:
    """Parameters of one layer of that kind on one rank, by part; "experts": of its own ones."""
    counts: Counter[str] = Counter()
    here = kind.routed.number // ep if kind.routed else 0
    for entry in kind.entries:
        own = entry.expert is not None
        counts["experts" if own else entry.kind] += (
            here * entry.elements(cut) if own else entry.elements(tp)
        )
    return counts


def is_matrix(entry: Entry) -> bool:
    """Return True if Muon takes it: a matrix of a layer, and no table."""
    return len(entry.shape) == 2 and entry.kind in ("attention", "ffn") and not entry.table


@lru_cache(maxsize=1024)
def in_matrices(kind: Kind, tp: int, ep: int, cut: int) -> tuple[int, int]:
    """Return a rank's parameters of one layer that are in matrices, and those of its experts."""
    counts = [0, 0]
    here = kind.routed.number // ep if kind.routed else 0
    for entry in kind.entries:
        if is_matrix(entry):
            own = entry.expert is not None
            counts[own] += here * entry.elements(cut) if own else entry.elements(tp)
    return counts[0], counts[1]


def parameters(
    config: Config | Structure, layout: Layout = ALONE, stage: int | Stage | None = None
) -> dict[str, int]:
    """Parameters on one rank, by part: embedding, attention, ffn, norms, head.

    stage: which of the layout's, counted from 0; None: the last, which of equal ones has the most;
    or any `Stage`. Experts, of which a rank has its own, count as feed-forward networks. Raises
    ValueError for degrees that do not divide heads, key-value heads, the width of the feed-forward
    network or of an expert (tp), the layers (pp) or the experts (ep).
    """
    here = placed(config, layout, stage)
    check_expert_degree(config, layout.ep)
    return dict(held_by(structure(config), layout, here).kinds)


def by_kind(model: Structure, here: Stage) -> list[tuple[Kind, int]]:
    """The kinds of layers of a stage, and how many of each it has."""
    return [(k, n) for k, n in zip(model.kinds, model.counted(here.chunks), strict=True) if n]


def parameter_count(config: Config | Structure) -> int:
    """Parameters of the whole model; tied ones count once."""
    return structure(config).total


def in_experts(
    config: Config | Structure, layout: Layout = ALONE, stage: int | Stage | None = None
) -> int:
    """Of the `parameters`, those of the rank's experts, which other ranks lack."""
    here = placed(config, layout, stage)
    check_expert_degree(config, layout.ep)
    return held_by(structure(config), layout, here).experts


@dataclass(frozen=True)
class Held:
    """Parameters of one rank."""

    all: int
    experts: int  # of these, its own experts'
    kinds: dict[str, int]  # all of them, by part
    matrices: int = 0  # of layers, beside those of experts
    own: int = 0  # the same of its experts

    def muon(self, layout: Layout) -> int:
        """The parameters of which the rank keeps Muon's state: a share of the matrices."""
        if not layout.zero:
            return self.matrices + self.own
        return ceil_div(self.matrices, layout.shards) + ceil_div(self.own, layout.alike)

    def shard(self, layout: Layout) -> int:
        """Those of which ZeRO leaves the states on the rank: ranks that have the same divide them.

        All ranks of a group do, and of an expert an ep-th of these. Shards are rounded up.
        """
        shards = layout.shards
        same = self.all - self.experts
        return ceil_div(same, shards) + ceil_div(self.experts, layout.alike)


def held_by(model: Structure, layout: Layout, here: Stage) -> Held:
    """What a rank of a stage holds, by number alone: for a thousand layouts, and without checks."""
    counts = model.counted(here.chunks)
    cuts = layout.tp, layout.ep, layout.cut
    return _held(model, cuts, counts, here.embedding, here.head)


@lru_cache(maxsize=4096)
def _held(
    model: Structure,
    cuts: tuple[int, int, int],
    layers: tuple[int, ...],
    embedding: bool,
    head: bool,
) -> Held:
    counts, own = dict.fromkeys(KINDS, 0), 0
    matrices = [0, 0]
    first, *last = model.outside
    ends = [first] if embedding else []
    if head:
        ends += [e for e in last if e.tied is None or not embedding]
        if model.ahead and not model.tied and not embedding:
            ends.append(first)  # which modules that predict further tokens read, too
    for entry in ends:
        counts[entry.kind] += entry.elements(cuts[0])
    for kind, n in zip(model.kinds, layers, strict=True):
        for part, elements in in_layer(kind, *cuts).items() if n else ():
            counts["ffn" if part == "experts" else part] += n * elements
            own += n * elements if part == "experts" else 0
        for expert, elements in enumerate(in_matrices(kind, *cuts) if n else ()):
            matrices[expert] += n * elements
    return Held(sum(counts.values()), own, counts, *matrices)
