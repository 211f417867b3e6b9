"""A layout: how many replicas, how the model is split, what each rank does and its groups.

All code that needs to know which rank holds what uses a Layout: memory, mesh, planner, engines.

N = d · p · c · t ranks form a grid with four axes: d replicas of the model ("dp"), p stages of each
replica ("pp"), c ranks that share each sequence ("cp"), t ranks that share each matrix ("tp"). A
rank's number is its position in the grid, read like a number with four digits; `order` lists the
digits, most significant first. Along the last axis neighbours have consecutive numbers, so a group
of that axis is in one node if the node holds that many ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations, product

from shardlab.common.arguments import check_count, check_one_of, drop_none, join_names, shorten_repr
from shardlab.common.shapes import Config

from .stages import Stage, build_stages, check_schedule, check_stage_rule, order_stages
from .structure import Structure

AXES = "dp", "pp", "cp", "tp"
OFFLOAD_CHOICES = "none", "optimizer", "parameters"
RECOMPUTE_OPERATORS = "attention", "norms", "ffn", "latents"  # that can be recomputed, one by one
_COUNT_FIELDS = "dp", "tp", "pp", "micro_batch", "microbatches", "cp", "ep", "chunks", "replicas"


@dataclass(frozen=True)
class Layout:
    """A way to split a model over ranks, with the size of a step's batch."""

    dp: int = 1  # [d] replicas
    tp: int = 1  # [t] ranks that share each matrix
    pp: int = 1  # [p] stages
    zero: int = 0  # ZeRO stage, over the replicas
    micro_batch: int = 1  # [b] sequences of a micro-batch
    microbatches: int = 1  # [m] per step and replica, one after the other
    recompute: str = "none"  # or "selective", "full", or operators: "norms+ffn"
    sequence_parallel: bool = False
    cp: int = 1  # [c] ranks that share each sequence
    ep: int = 1  # ranks with the same other weights that share the experts
    chunks: int = 1  # [v] model parts per stage, for "interleaved" and "zb-v"
    schedule: str = "1f1b"  # pipeline schedule: one of SCHEDULES
    replicas: int = 1  # groups; ZeRO shards over the dp / replicas copies in each (HSDP)
    offload: str = "none"  # moved to host memory: "optimizer", or "parameters" (ZeRO-3)
    stages: str | tuple[int, ...] = "equal"  # one of STAGE_RULES, or layers per stage
    # Axes from the outermost to the innermost; axes of one rank may be left out.
    order: tuple[str, ...] = AXES
    # Ranks that share each matrix of an expert; None: the tensor ranks. With fewer, the other
    # tensor ranks join those that share the experts (folding: Liu et al. 2025, arXiv 2504.14960).
    etp: int | None = None

    def __post_init__(self) -> None:
        check_count(**{name: getattr(self, name) for name in _COUNT_FIELDS})
        check_count(ranks=self.world_size, **drop_none(etp=self.etp))
        self._check_order()
        check_one_of((0, 1, 2, 3), zero=self.zero)
        check_one_of(OFFLOAD_CHOICES, offload=self.offload)
        parse_recompute(self.recompute)
        check_one_of((False, True), sequence_parallel=self.sequence_parallel)
        self._check_sharding()
        check_schedule(self.pp, self.schedule, self.chunks)
        check_stage_rule(self.pp, self.stages)

    def _check_order(self) -> None:
        wide = [axis for axis in AXES if getattr(self, axis) > 1]
        once = len({*self.order}) == len(self.order)
        if not once or not {*wide} <= {*self.order} <= {*AXES}:
            needs = f", with {', '.join(wide)} among them" if wide else ""
            rule = f"must be some of dp, pp, cp and tp, each once at most{needs}"
            raise ValueError(f"order={shorten_repr(self.order)}: {rule}")

    def _check_sharding(self) -> None:
        if self.dp % self.replicas:
            raise ValueError(f"replicas={self.replicas}: must divide dp={self.dp}")
        if (share := self.zero_degree * self.tp) % (self.ep * self.expert_tp):
            peers = "ranks of a group" if self.replicas > 1 else "ranks with the same weights"
            folded = "" if self.etp is None else f" with etp={self.etp}"
            raise ValueError(
                f"ep={self.ep}: must divide the {share // self.expert_tp} {peers}{folded}"
            )
        if self.replicas > 1 and not self.zero:
            raise ValueError(f"replicas={self.replicas}: must be 1 with zero=0")
        if self.offload == "parameters" and self.zero != 3:
            raise ValueError(f"zero={self.zero}: must be 3 with offload='parameters'")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> int:
        """[B] sequences in one step, over all replicas."""
        return self.dp * self.micro_batch * self.microbatches

    @property
    def zero_degree(self) -> int:
        """The number of ranks that ZeRO shards over: dp / replicas, times context ranks."""
        return self.dp // self.replicas * self.cp

    @property
    def expert_tp(self) -> int:
        """The number of ranks that share each matrix of an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_zero_degree(self) -> int:
        """The number of ranks with the same experts, over which ZeRO shards their states."""
        return self.zero_degree * self.tp // (self.ep * self.expert_tp)

    def build_stages(self, config: Config | Structure) -> list[Stage]:
        """Return the content of each stage, first to last; raises as `stages.build_stages` does."""
        return build_stages(config, self.pp, self.stages, self.schedule, self.chunks)

    @property
    def stage_order(self) -> list[int]:
        """The stage of each part of the model, in the model's order."""
        return order_stages(self.pp, self.schedule, self.chunks)

    # Ranks, positions and groups.

    def check_world_size(self, ranks: int) -> None:
        """Raise ValueError unless `ranks` equals the product of the degrees."""
        if ranks != self.world_size:
            context = f", cp={self.cp}" if self.cp > 1 else ""
            degrees = f"dp={self.dp}, pp={self.pp}{context} and tp={self.tp}"
            needed = f"{self.world_size}, the product of {degrees}"
            raise ValueError(f"ranks={shorten_repr(ranks)}: must be {needed}")

    def get_coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position along each axis: the digits of its number."""
        found = dict.fromkeys(AXES, 0)
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def find_rank(self, **place: int) -> int:
        """Return the rank at a position; along axes that are left out, at 0."""
        number = 0
        for axis in self.order:
            number = number * getattr(self, axis) + place.get(axis, 0)
        return number

    def list_groups(self, axis: str) -> list[list[int]]:
        """Return the groups of an axis: ranks whose positions differ along it alone."""
        others = [other for other in self.order if other != axis]
        found = []
        for rest in product(*(range(getattr(self, other)) for other in others)):
            place = dict(zip(others, rest, strict=True))
            found.append([self.find_rank(**place, **{axis: i}) for i in range(getattr(self, axis))])
        return found

    def iter_edges(self, axis: str) -> Iterator[tuple[int, int]]:
        """Yield (sender, receiver) pairs: rings within the groups of "dp", "cp" and "tp".

        "pp": both ways between stages of neighbouring parts; "twin": between the ends, if tied.
        """
        for group in self.list_groups("pp" if axis == "twin" else axis):
            stages = [group[stage] for stage in self.stage_order] if axis in ("pp", "twin") else []
            if axis == "pp":
                for stage, later in zip(stages, stages[1:], strict=False):
                    if stage != later:  # at the turn of a V nothing is sent
                        yield from ((stage, later), (later, stage))
            elif axis == "twin" and stages[0] != stages[-1]:
                yield from ((stages[0], stages[-1]), (stages[-1], stages[0]))
            elif axis in ("dp", "cp", "tp") and len(group) > 1:
                yield from zip(group, [*group[1:], group[0]], strict=True)

    def count_node_egress(
        self, node: int, bytes_sent: Callable[[int], Mapping[str, float]]
    ) -> dict[str, list[float]]:
        """Return, by axis, the bytes that leave each node of `node` ranks.

        bytes_sent(rank): bytes sent along each axis and to the "twin"; missing axes are 0. They go
        in equal parts to the rank's receivers in `iter_edges`. Raises ValueError unless `node`
        divides the ranks.
        """
        if self.world_size % node:
            raise ValueError(f"node={node}: must divide the {self.world_size} ranks")
        found = {}
        for axis in (*AXES, "twin"):
            edges = list(self.iter_edges(axis))
            ways = Counter(source for source, _ in edges)
            found[axis] = [0.0] * (self.world_size // node)
            for source, target in edges:
                if source // node != target // node:
                    found[axis][source // node] += bytes_sent(source).get(axis, 0) / ways[source]
        return found

    # Text.

    def __str__(self) -> str:
        degrees = ("t", self.tp), ("p", self.pp), ("c", self.cp), ("e", self.ep)
        cuts = [f"{n} {size}" for n, size in degrees if size > 1]
        words = [" · ".join([f"d {self.dp}", *cuts])]
        if self.etp is not None:
            words.append(f"experts cut {self.etp}")
        if self.zero:
            groups = f" in {self.replicas} groups" if self.replicas > 1 else ""
            words.append(f"ZeRO-{self.zero}{groups}")
        if self.recompute != "none":
            parts = {"full": "", "selective": " attention"}
            words.append("recompute" + parts.get(self.recompute, f" {self.recompute}"))
        if self.pp > 1 and self.schedule != "1f1b":
            chunks = f" {self.chunks}" if self.schedule == "interleaved" else ""
            words.append(self.schedule + chunks)
        if self.offload != "none":
            words.append(f"{self.offload} on the host")
        if self.pp > 1 and not isinstance(self.stages, str):
            words.append(f"layers {_format_layers(self.stages)}")
        return ", ".join(words)


def list_axis_orders(layout: Layout) -> list[Layout]:
    """Return the layout in every distinct axis order; axes of one rank are left out."""
    wide = [axis for axis in AXES if getattr(layout, axis) > 1]
    return [replace(layout, order=order) for order in permutations(wide)]


def _format_layers(layers: tuple[int, ...]) -> str:
    runs: list[list[int]] = []  # [repeats, layers]: 15+3×16+15
    for n in layers:
        if runs and runs[-1][1] == n:
            runs[-1][0] += 1
        else:
            runs.append([1, n])
    return "+".join(str(n) if times == 1 else f"{times}×{n}" for times, n in runs)


def parse_recompute(recompute: str) -> frozenset[str]:
    """Return the OPERATORS that are recomputed. Raises ValueError for unknown names.

    recompute: "none"; "selective", the core of attention; names joined by "+" ("latents": the
    queries, keys and values that are made of latents); or "full", for which the set is empty: only
    the layer's input is kept, and its backward recomputes the rest.
    """
    if recompute in ("none", "full"):
        return frozenset()
    named = ["attention"] if recompute == "selective" else str(recompute).split("+")
    if len(set(named) & set(RECOMPUTE_OPERATORS)) < len(named):
        some = f"some of {join_names(RECOMPUTE_OPERATORS)} joined by '+'"
        raise ValueError(f"recompute={recompute!r}: must be 'none', 'selective', 'full', or {some}")
    return frozenset(named)


SINGLE_RANK = Layout()  # one rank, one sequence per step
