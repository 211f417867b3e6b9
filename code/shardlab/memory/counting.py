"""Parameter counts of a shape: all, by part, and on one rank.

Counts come from the ledger (`shardlab.layout`), which says how each axis cuts a parameter. A
vocabulary is padded to a multiple of the tensor degree; a tied head on another stage than the
embedding is a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardlab.common.arguments import check_integer, drop_none
from shardlab.common.shapes import Config
from shardlab.layout import PARAMETER_KINDS, SINGLE_RANK, Layout, Stage, Structure, get_structure
from shardlab.layout.parameters import ParamInfo
from shardlab.layout.stages import list_stage_params
from shardlab.layout.structure import LayerKind, check_expert_degree, check_tensor_degree

from .units import ceil_div


def resolve_stage(
    config: Config | Structure, layout: Layout, stage: int | Stage | None = None
) -> Stage:
    """Return the Stage with number `stage` (None: the last); a Stage is returned as it is.

    Raises ValueError unless the shape and its experts can be divided by the layout's degrees.
    """
    check_tensor_degree(config, layout.tp, copies=True)
    check_expert_degree(config, layout.ep)
    if isinstance(stage, Stage):
        return stage
    found = layout.build_stages(config)
    check_integer(0, layout.pp - 1, **drop_none(stage=stage))
    return found[-1 if stage is None else stage]


def list_parameter_shapes(
    config: Config, layout: Layout = SINGLE_RANK
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one rank's parameters, by name, on a pipeline's last stage."""
    here = resolve_stage(config, layout)
    return {
        entry.name: entry.get_local_shape(layout.tp if entry.expert is None else layout.expert_tp)
        for entry in list_stage_params(config, here, layout.ep)
    }


@lru_cache(maxsize=1024)
def list_layer_entries(
    kind: LayerKind, tp: int, ep: int, cut: int
) -> tuple[tuple[ParamInfo, int], ...]:
    """Return the entries of a kind of layer, each with its number of elements on a rank.

    The entry of the expert that stands for all counts all of the rank's experts.
    """
    here = kind.routed.num_experts // ep if kind.routed else 0
    return tuple(
        (e, e.count_elements(tp) if e.expert is None else here * e.count_elements(cut))
        for e in kind.parameters
    )


def is_matrix(entry: ParamInfo) -> bool:
    """Return True if Muon trains the entry: a matrix of a layer, and no table."""
    return len(entry.shape) == 2 and entry.kind in ("attention", "ffn") and not entry.is_lookup


def count_rank_parameters(
    config: Config | Structure, layout: Layout = SINGLE_RANK, stage: int | Stage | None = None
) -> dict[str, int]:
    """Count the parameters on one rank, by part: embedding, attention, ffn, norms, head.

    stage: number of the stage, from 0; None: the last, the largest of equal ones; or any `Stage`. A
    rank's experts count as feed-forward networks. Raises ValueError for degrees that do not divide
    heads, key-value heads, the width of the feed-forward network or of an expert (tp), the layers
    (pp) or the experts (ep).
    """
    here = resolve_stage(config, layout, stage)
    return dict(count_held(get_structure(config), layout, here).by_part)


def list_layer_kinds(model: Structure, stage: Stage) -> list[tuple[LayerKind, int]]:
    """Return the kinds of layers on a stage, each with its number of layers."""
    return [(k, n) for k, n in zip(model.kinds, model.count_kinds(stage.chunks), strict=True) if n]


def count_parameters(config: Config | Structure) -> int:
    """Count the parameters of the whole model; tied ones count once."""
    return get_structure(config).num_params


def count_expert_parameters(
    config: Config | Structure, layout: Layout = SINGLE_RANK, stage: int | Stage | None = None
) -> int:
    """Count those of the `count_rank_parameters` that are in the rank's experts."""
    here = resolve_stage(config, layout, stage)
    return count_held(get_structure(config), layout, here).experts


@dataclass(frozen=True)
class ParamCounts:
    """Parameter counts of one rank."""

    total: int
    experts: int  # in its own experts
    by_part: dict[str, int]
    matrices: int = 0  # in matrices of layers, without the experts'
    expert_matrices: int = 0  # in matrices of its experts

    def count_muon(self, layout: Layout) -> int:
        """Return the number of parameters whose Muon state the rank keeps."""
        if not layout.zero:
            return self.matrices + self.expert_matrices
        return ceil_div(self.matrices, layout.zero_degree) + ceil_div(
            self.expert_matrices, layout.expert_zero_degree
        )

    def count_sharded(self, layout: Layout) -> int:
        """Return the number of parameters whose states ZeRO leaves on the rank.

        Ranks with the same parameters divide them, fewer ranks for experts. Shards are rounded up.
        """
        shards = layout.zero_degree
        same = self.total - self.experts
        return ceil_div(same, shards) + ceil_div(self.experts, layout.expert_zero_degree)


def count_held(model: Structure, layout: Layout, stage: Stage) -> ParamCounts:
    """Return the counts of a rank of a stage, cached and unchecked, for plans of many layouts."""
    cuts = layout.tp, layout.ep, layout.expert_tp
    return _count_held(
        model, cuts, model.count_kinds(stage.chunks), stage.has_embedding, stage.has_head
    )


@lru_cache(maxsize=4096)
def _count_held(
    model: Structure,
    cuts: tuple[int, int, int],
    layers: tuple[int, ...],
    embedding: bool,
    head: bool,
) -> ParamCounts:
    counts, experts, matrices = dict.fromkeys(PARAMETER_KINDS, 0), 0, [0, 0]
    first, *last = model.outer_params
    ends = [first] if embedding else []
    if head:
        ends += [e for e in last if not (e.tied_to and embedding)]
    for entry in ends:
        counts[entry.kind] += entry.count_elements(cuts[0])
    for kind, n in zip(model.kinds, layers, strict=True):
        for entry, elements in list_layer_entries(kind, *cuts) if n else ():
            own = entry.expert is not None
            counts["ffn" if own else entry.kind] += n * elements
            experts += n * elements * own
            if is_matrix(entry):
                matrices[own] += n * elements
    return ParamCounts(sum(counts.values()), experts, counts, *matrices)
