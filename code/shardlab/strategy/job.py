"""A job: a model, in a layout, on a machine, by an implementation; and what follows from these.

Letters as in `cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from shardlab.layout import Layout, Stage
from shardlab.machines import Machine
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
        if dense or not config.experts:
            return config.ffn_width
        return (config.experts_per_token + config.shared_experts) * config.expert_width


def parameters(job: Job, stage: Stage) -> float:
    """Parameters of one rank of a stage, without the few of norms and biases."""
    config, h, t = job.config, job.config.hidden, job.layout.tp
    layers = stage.layers * 2 * h * (h + job.heads)
    dense = stage.dense if config.experts else stage.layers
    layers += dense * job.matrices * h * config.ffn_width
    if config.experts:  # the router stands on every rank
        shared = job.matrices * h * config.shared_experts * config.expert_width
        layers += (stage.layers - dense) * (shared + config.experts * h * t)
    once = stage.embedding and stage.head and config.tied
    ends = 1 if once else stage.embedding + stage.head
    return (layers + ends * config.vocab * h) / t + dealt(job, stage)


def dealt(job: Job, stage: Stage) -> float:
    """Of these parameters, those of the rank's own experts."""
    config, layout = job.config, job.layout
    one = job.matrices * config.hidden * config.expert_width / layout.tp
    return (stage.layers - stage.dense) * config.experts // layout.ep * one


def sharded(job: Job, stage: Stage) -> float:
    """The parameters of which ZeRO leaves the states on a rank.

    Those that have the same share them: all ranks of a group, or an ep-th of these.
    """
    own, shards = dealt(job, stage), job.layout.shards
    return (parameters(job, stage) - own) / shards + own / (shards / job.layout.ep)
