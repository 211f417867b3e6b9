"""How many parameters a shape has: all of them, by part, and on one rank.

Read from the ledger (`shardlab.layout`), which says how each axis cuts a parameter. A vocabulary is
padded up to a multiple of the tensor degree; a tied head on another stage than the embedding is a
copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardlab.common.arguments import check_whole, given
from shardlab.common.shapes import Config
from shardlab.layout import ALONE, KINDS, Layout, Stage, Structure, structure
from shardlab.layout.entries import Entry
from shardlab.layout.stages import held
from shardlab.layout.structure import Kind, check_expert_degree, check_tensor_degree

from .units import ceil_div


def placed(config: Config | Structure, layout: Layout, stage: int | Stage | None = None) -> Stage:
    """The stage that is meant: by number; None: the last; or a `Stage`, which it returns.

    Raises ValueError unless the shape can be cut so across and along, and its experts dealt out.
    """
    check_tensor_degree(config, layout.tp, copies=True)
    check_expert_degree(config, layout.ep)
    if isinstance(stage, Stage):
        return stage
    found = layout.parts(config)
    check_whole(0, layout.pp - 1, **given(stage=stage))
    return found[-1 if stage is None else stage]


def shapes(config: Config, layout: Layout = ALONE) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter that one rank holds, of a pipeline's last stage, by name."""
    here = placed(config, layout)
    return {
        entry.name: entry.local(layout.tp if entry.expert is None else layout.cut)
        for entry in held(config, here, layout.ep)
    }


@lru_cache(maxsize=1024)
def in_layer(kind: Kind, tp: int, ep: int, cut: int) -> tuple[tuple[Entry, int], ...]:
    """The entries of a layer of that kind, and the elements of each on a rank.

    Of the expert that stands for all: those of all the rank's own ones.
    """
    here = kind.routed.number // ep if kind.routed else 0
    return tuple(
        (e, e.elements(tp) if e.expert is None else here * e.elements(cut)) for e in kind.entries
    )


def is_matrix(entry: Entry) -> bool:
    """Return True if Muon takes it: a matrix of a layer, and no table."""
    return len(entry.shape) == 2 and entry.kind in ("attention", "ffn") and not entry.table


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
    cuts = layout.tp, layout.ep, layout.cut
    return _held(model, cuts, model.counted(here.chunks), here.embedding, here.head)


@lru_cache(maxsize=4096)
def _held(
    model: Structure,
    cuts: tuple[int, int, int],
    layers: tuple[int, ...],
    embedding: bool,
    head: bool,
) -> Held:
    counts, experts, matrices = dict.fromkeys(KINDS, 0), 0, [0, 0]
    first, *last = model.outside
    ends = [first] if embedding else []
    if head:
        ends += [e for e in last if not (e.tied and embedding)]
    for entry in ends:
        counts[entry.kind] += entry.elements(cuts[0])
    for kind, n in zip(model.kinds, layers, strict=True):
        for entry, elements in in_layer(kind, *cuts) if n else ():
            own = entry.expert is not None
            counts["ffn" if own else entry.kind] += n * elements
            experts += n * elements * own
            if is_matrix(entry):
                matrices[own] += n * elements
    return Held(sum(counts.values()), experts, counts, *matrices)
