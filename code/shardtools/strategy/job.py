"""A job: a model, in a layout, on a machine, by an implementation; and what follows from these.

Letters as in `cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Stage, Structure, structure
from shardlab.layout.structure import Kind
from shardlab.memory.counting import Held, by_kind, held_by

from .profile import Profile

# Of 8 bits with a scale for each tensor, or for each block of 32 numbers (MX); of 4 bits.
DTYPES = "bf16", "fp8", "mxfp8", "nvfp4"


@dataclass(frozen=True)
class Job:
    """What is predicted: a model, in a layout, on a machine, by an implementation."""

    config: Config | Structure
    machine: Machine
    layout: Layout
    profile: Profile
    seq: int
    dtype: str = "bf16"  # in which products of matrices are computed: one of DTYPES

    @cached_property
    def model(self) -> Structure:
        """What it is made of."""
        return structure(self.config)

    @cached_property
    def stages(self) -> list[Stage]:
        """What stands on each stage; ValueError for layers that the stages cannot share."""
        return self.layout.parts(self.model)

    @cached_property  # the same whatever the rates are: a fit predicts each job a thousand times
    def fullest(self) -> Stage:
        """The stage of whose parameters a rank has most."""
        return max(self.stages, key=lambda stage: self.held(stage).all)

    @property
    def flops(self) -> float:
        """Operations per second of products in that format, as the data sheet has it."""
        bits = {"fp8": self.machine.fp8, "mxfp8": self.machine.fp8, "nvfp4": self.machine.fp4}
        return bits.get(self.dtype) or self.machine.flops

    @property
    def tokens(self) -> float:
        """Of one micro-batch on one rank."""
        return self.layout.micro_batch * self.seq / self.layout.cp

    @property
    def stream(self) -> float:
        """Bytes of the residual stream of those tokens, uncut."""
        return 2 * self.tokens * self.model.hidden

    @property
    def sequence(self) -> int:
        """Into how many parts the residual stream is cut."""
        along = self.layout.sequence_parallel or self.profile.sequence_parallel
        return self.layout.tp if along else 1

    @property
    def nodes(self) -> int:
        """Nodes that the job takes."""
        return ceil(self.layout.ranks / self.machine.per_node)

    @property
    def captured(self) -> bool:
        """Whether a step is one CUDA graph, of which no CPU launches the layers."""
        layout = self.layout
        return self.profile.captured and layout.pp == 1 and layout.offload != "parameters"

    def held(self, stage: Stage) -> Held:
        """Parameters of one rank of a stage."""
        return held_by(self.model, self.layout, stage)

    def layers(self, stage: Stage) -> list[tuple[Kind, int]]:
        """The kinds of layers of a stage, and how many of each it has."""
        return by_kind(self.model, stage)
