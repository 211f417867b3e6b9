"""A job: a model, in a layout, on a machine, by an implementation; and what follows from these.

Letters as in `cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from shardlab.layout import Layout, Stage
from shardlab.machines import Machine
from shardlab.memory.counting import Held, held_by
from shardlab.shapes import Config

from .profile import Profile


@dataclass(frozen=True)
class Job:
    """What is predicted: a model, in a layout, on a machine, by an implementation."""

    config: Config
    machine: Machine
    layout: Layout
    profile: Profile
    seq: int
    fp8: bool = False  # products of matrices in 8 bits

    @property
    def flops(self) -> float:
        """Operations per second of products, as the data sheet has it."""
        return self.machine.fp8 if self.fp8 and self.machine.fp8 else self.machine.flops

    @property
    def tokens(self) -> float:
        """Of one micro-batch on one rank."""
        return self.layout.micro_batch * self.seq / self.layout.cp

    @property
    def stream(self) -> float:
        """Bytes of the residual stream of those tokens, uncut."""
        return 2 * self.tokens * self.config.hidden

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

    @property
    def heads(self) -> int:
        """Width of keys (or of values): heads times their size."""
        return self.config.key_value_heads * self.config.head_size

    @property
    def matrices(self) -> int:
        """Of a feed-forward network."""
        return 3 if self.config.mlp == "swiglu" else 2

    def width(self, dense: bool) -> float:
        """Of the feed-forward networks that one token goes through in a layer."""
        config = self.config
        return config.ffn_width if dense or not config.experts else config.chosen_width

    def held(self, stage: Stage) -> Held:
        """Parameters of one rank of a stage."""
        return held_by(self.config, self.layout, stage)
