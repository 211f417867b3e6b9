"""A job to predict (model, layout, machine, implementation) and its derived quantities.

Symbols as in `cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Stage, Structure, get_structure
from shardlab.layout.structure import LayerKind
from shardlab.memory.counting import ParamCounts, count_held, list_layer_kinds

from .profile import Profile

# fp8: a scale per tensor; mxfp8: a scale per block of 32 numbers; nvfp4: 4 bits.
DTYPES = "bf16", "fp8", "mxfp8", "nvfp4"


@dataclass(frozen=True)
class Job:
    """A job to predict: a model, a layout, a machine and an implementation."""

    config: Config | Structure
    machine: Machine
    layout: Layout
    profile: Profile
    seq: int
    dtype: str = "bf16"  # the format of matrix products: one of DTYPES

    @cached_property
    def model(self) -> Structure:
        """The structure of the model."""
        return get_structure(self.config)

    @cached_property
    def stages(self) -> list[Stage]:
        """Model parts of each stage. Raises ValueError if the stages cannot share the layers."""
        return self.layout.build_stages(self.model)

    @cached_property  # independent of the rates: a fit predicts each job a thousand times
    def fullest_stage(self) -> Stage:
        """The stage whose ranks hold the most parameters."""
        return max(self.stages, key=lambda stage: self.count_parameters(stage).total)

    @property
    def flops(self) -> float:
        """Operations per second of products in the job's dtype, from the data sheet."""
        bits = {"fp8": self.machine.fp8, "mxfp8": self.machine.fp8, "nvfp4": self.machine.fp4}
        return bits.get(self.dtype) or self.machine.flops

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one rank."""
        return self.layout.micro_batch * self.seq / self.layout.cp

    @property
    def stream_bytes(self) -> float:
        """Bytes of the uncut residual stream of one micro-batch's tokens."""
        return 2 * self.tokens * self.model.hidden

    @property
    def sequence_shards(self) -> int:
        """Number of parts into which sequence parallelism cuts the residual stream."""
        along = self.layout.sequence_parallel or self.profile.sequence_parallel
        return self.layout.tp if along else 1

    @property
    def nodes(self) -> int:
        """Nodes that the job takes."""
        return ceil(self.layout.world_size / self.machine.gpus_per_node)

    @property
    def is_captured(self) -> bool:
        """True if a step is one CUDA graph, whose layers no CPU launches."""
        layout = self.layout
        return self.profile.captures_graph and layout.pp == 1 and layout.offload != "parameters"

    def count_parameters(self, stage: Stage) -> ParamCounts:
        """Return the parameters of one rank of a stage."""
        return count_held(self.model, self.layout, stage)

    def count_layers(self, stage: Stage) -> list[tuple[LayerKind, int]]:
        """Return the kinds of layers of a stage, and how many of each it has."""
        return list_layer_kinds(self.model, stage)
