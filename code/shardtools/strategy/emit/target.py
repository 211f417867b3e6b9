"""The input of every engine's writer, common checks, and reasons that several engines print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardlab.common.arguments import check_integer, join_names
from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure
from shardlab.layout.structure import (
    check_expert_degree,
    check_tensor_degree,
    get_structure,
    require_course_config,
)
from shardtools.strategy.profile import PROFILES

FILE_WIDTH = 100  # columns of the files that are written
SHAPED = "torchtitan", "megatron", "course"  # engines whose files give the model's shape
# Fields of a shape that no configuration here sets, with the only value that each may have.
PLAIN_SHAPE = {
    "window": None, "latent": None, "yarn": None, "shared_experts": 0, "dense_layers": 0,
    "expert_groups": 1, "routed_scale": 1.0, "capacity": None,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A job for one engine: a shape, a machine, a layout, and `seq` tokens per sequence."""

    engine: str
    config: Config | Structure
    machine: Machine
    layout: Layout
    seq: int

    @classmethod
    def from_model(
        cls,
        engine: str,
        config: Config | Structure,
        machine: Machine,
        layout: Layout,
        seq: int | None,
    ) -> Target:
        """Make the job. seq: by default the model's longest. Raises ValueError as `emit` does."""
        own = get_structure(config)
        shape = require_course_config(config, emit=engine) if engine in SHAPED else own
        return cls(engine, shape, machine, layout, own.seq if seq is None else seq)

    def __post_init__(self) -> None:
        check_integer(seq=self.seq)
        layout, n = self.layout, self.machine.gpus_per_node
        if layout.world_size > n and layout.world_size % n:
            raise self.make_error(
                f"ranks={layout.world_size}", f"be at most {n}, or a multiple of {n}"
            )
        if self.engine == "slurm":  # it starts any program
            return
        check_tensor_degree(self.config, layout.tp, copies=self.engine == "megatron")
        operators = PROFILES[self.engine].recompute_operators if self.engine in PROFILES else ()
        self.check_allowed(recompute=["none", "selective", "full", *operators])
        check_expert_degree(self.config, layout.ep)
        if self.engine != "megatron":
            self.check_allowed(experts=[0])
        if self.engine in SHAPED:
            self.check_allowed(**{name: [only] for name, only in PLAIN_SHAPE.items()})
        if layout.cp > 1 and self.seq % (2 * layout.cp):  # each rank takes two pieces of a sequence
            raise self.make_error(f"seq={self.seq}", f"be a multiple of 2·cp = {2 * layout.cp}")
        if layout.sequence_parallel and self.seq // layout.cp % layout.tp:
            raise self.make_error(f"tp={layout.tp}", f"divide a sequence's tokens ({self.seq})")
        if layout.pp > 1:
            self.list_part_sizes()

    def check_allowed(self, when: str = "", **allowed: Sequence[object]) -> None:
        """Raise ValueError for a field of layout or shape whose value is not allowed.

        when: the other property of the layout that restricts the field, in words.
        """
        for name, values in allowed.items():
            value = getattr(self.layout if hasattr(self.layout, name) else self.config, name)
            if value not in values:
                rule = f"be {'' if len(values) == 1 else 'one of '}{join_names(values)}"
                raise self.make_error(f"{name}={value!r}", rule, when)

    def make_error(self, setting: str, rule: str, when: str = "") -> ValueError:
        """Return a ValueError for a field that this engine cannot express."""
        where = f"engine={self.engine!r}{f' and {when}' if when else ''}"
        return ValueError(f"{setting}: must {rule} with {where}")

    @property
    def nodes(self) -> int:
        """Number of nodes of the job."""
        return -(-self.layout.world_size // self.machine.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return min(self.layout.world_size, self.machine.gpus_per_node)

    @property
    def idle_percent(self) -> float:
        """Percent of a step in which a stage idles: p - 1 of vm + p - 1."""
        layout = self.layout
        return 100 * (layout.pp - 1) / (layout.chunks * layout.microbatches + layout.pp - 1)

    @property
    def half_dtype(self) -> str:
        """The 16-bit format that this GPU computes in: "bf16", or "fp16" if it has no bf16."""
        return "fp16" if self.machine.name.upper().startswith("V100") else "bf16"

    def torchrun_lines(self, program: str) -> list[str]:
        """Return the lines that start `program` on each node."""
        first = f"torchrun --nproc-per-node={self.ranks_per_node}"
        if self.nodes == 1:
            return [f"{first} {program}"]
        meet = f"--nnodes={self.nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29400"
        return [f"{first} {meet} \\", f"    {program}"]

    def list_part_sizes(self) -> list[int]:
        """Return the layers of each part of the model, in order: p parts, or v times as many.

        Under "interleaved" rank i has parts i, i + p, i + 2p; under "zb-v" i and 2p - 1 - i.
        """
        layout = self.layout
        placed = layout.build_stages(self.config)
        if not placed[0 if layout.schedule == "zb-v" else -1].has_head:
            raise self.make_error(f"stages={layout.stages!r}", "have the head on the last stage")
        chunks = [list(stage.chunks) for stage in placed]
        sizes = [len(chunks[i].pop(0)) for i in layout.stage_order]
        if 0 in sizes[1:-1]:
            rule = "leave at least one layer for each part between the first and the last"
            raise self.make_error(f"chunks={layout.chunks}", rule)
        return sizes

    @cached_property
    def reasons(self) -> dict[str, str]:
        """Reasons that several engines print, by the part of the layout that they explain."""
        layout, n, b = self.layout, self.machine.gpus_per_node, self.layout.micro_batch
        tensor = "no matrix is cut: layers have no all-reduces"
        if layout.tp > 1:
            inside = f"inside a node of {n}" if layout.tp <= n else f"beyond a node of {n}: slow"
            tensor = f"each matrix is cut over {layout.tp} ranks, {inside}"
        sequence = "each rank holds whole activations between the cut matrices"
        if layout.sequence_parallel and layout.tp > 1:
            sequence = "activations between the cut matrices are sharded, too, for the same traffic"
        pipeline = "every rank has all layers"
        microbatches = "micro-batches a step, one after another, add up to the batch"
        if layout.pp > 1:
            pipeline = f"{layout.pp} stages share the layers: little traffic, and some idle time"
            idle = f"{'at most ' * (layout.schedule == 'zb-v')}{self.idle_percent:.0f} %"
            microbatches = f"micro-batches fill the stages, which are idle for {idle} of a step"
        half = "products in 16 bits, with float32's range: no loss scaling"
        if self.half_dtype == "fp16":
            half = f"{self.machine.name} has no bf16: the loss has to be scaled"
        zero = (
            "every copy holds all weights, gradients and optimizer states",
            f"optimizer states are sharded over {layout.zero_degree} ranks, for the same traffic",
            f"optimizer states and gradients are sharded over {layout.zero_degree} ranks",
            f"weights, gradients and optimizer states are sharded over {layout.zero_degree} ranks",
        )
        recompute = {
            "none": "activations fit: nothing is recomputed",
            "selective": "attention's core is recomputed: large to save, cheap to compute",
            "norms+ffn": "operators between products are recomputed: large to save, but cheap",
            "full": "each layer is recomputed: a third more arithmetic, but few saved activations",
            "norms": "norms are recomputed: memory passes in place of saved outputs",
        }
        micro_batch = "sequences at a time: more need more memory, and make larger products"
        return {
            "tensor": tensor,
            "sequence": sequence,
            "pipeline": pipeline,
            "zero": zero[layout.zero],
            "micro_batch": micro_batch,
            "microbatches": microbatches,
            "batch": f"sequences a step: d {layout.dp} · b {b} · m {layout.microbatches}",
            "recompute": recompute[layout.recompute],
            "half": half,
        }

    def title_lines(self) -> list[str]:
        """Return a description of the file, in two lines."""
        gpus = f"{self.layout.world_size} × {self.machine.name}"
        longest = f" (of at most {self.config.seq})" * (self.seq < self.config.seq)
        return [f"Layout: {self.layout}", f"on {gpus}, {self.seq} tokens a sequence{longest}"]


Row = tuple[object, str, str]  # condition, line, reason ("" for none)


def annotate_lines(rows: list[Row], mark: str = "#", indent: int = 0) -> list[str]:
    """Return lines with reasons in a second column, or above the lines if any would be too long."""
    space, shown = " " * indent, [(line, why) for when, line, why in rows if when]
    column = max(len(line) for line, _ in shown)
    longest = max(len(why) for _, why in shown)
    if indent + column + 2 + len(mark) + 1 + longest <= FILE_WIDTH:
        lines = [f"{line.ljust(column)}  {mark} {why}" if why else line for line, why in shown]
    else:
        lines = [text for line, why in shown for text in ([f"{mark} {why}"] * bool(why)) + [line]]
    return [space + text for text in lines]
