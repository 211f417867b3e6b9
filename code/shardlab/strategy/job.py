"""A job: a model, in a layout, on a machine, by an implementation; and what follows from these.

Letters as in `cost`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from shardlab.layout import Layout, Stage
from shardlab.layout.entries import outside
from shardlab.machines import Machine
from shardlab.memory.counting import in_layer
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


@dataclass(frozen=True)
class _Counts:
    """Parameters on one rank, of what stages are made of."""

    dense: int  # of a layer without experts
    sparse: int  # of a layer with some
    own: int  # of these, those of the rank's own experts
    embedding: int
    end: int  # last norm and head


@lru_cache(maxsize=1024)
def _counts(config: Config, tp: int, ep: int) -> _Counts:
    dense = sum(in_layer(config, tp, ep, False).values())
    sparse = in_layer(config, tp, ep, True) if config.experts else Counter()
    first, *last = (entry.elements(tp) for entry in outside(config))
    return _Counts(dense, sum(sparse.values()), sparse["experts"], first, sum(last))


def parameters(job: Job, stage: Stage) -> int:
    """Parameters of one rank of a stage: `memory.parameters`, for a thousand layouts."""
    config, each = job.config, _counts(job.config, job.layout.tp, job.layout.ep)
    sparse = stage.layers - stage.dense if config.experts else 0
    layers = (stage.layers - sparse) * each.dense + sparse * each.sparse
    once = config.tied and stage.embedding and stage.head
    return layers + stage.head * each.end + (stage.embedding - once) * each.embedding


def dealt(job: Job, stage: Stage) -> int:
    """Of these parameters, those of the rank's own experts."""
    own = _counts(job.config, job.layout.tp, job.layout.ep).own
    return (stage.layers - stage.dense) * own


def sharded(job: Job, stage: Stage) -> float:
    """The parameters of which ZeRO leaves the states on a rank.

    Those that have the same share them: all ranks of a group, or an ep-th of these.
    """
    own, shards = dealt(job, stage), job.layout.shards
    return (parameters(job, stage) - own) / shards + own / (shards / job.layout.ep)
