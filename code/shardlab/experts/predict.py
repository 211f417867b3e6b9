"""What experts cost, by formula: parameters held and used, bytes sent, and who waits.

E experts, k of them for each token, N ranks, T tokens of a rank, h hidden, e bytes an element.

    an expert                   2 h F, or 3 h F with a gate, and its biases
    a rank holds                everything else, and E/N experts in each layer
    a token uses                everything else, and k experts in each layer
    an exchange                 T k h e bytes handed to all-to-all by a rank, if choices are even
    a layer's step              four of them: dispatch and combine, forward and backward
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardlab import memory
from shardlab.common.shapes import Config
from shardlab.layout import Layout

from .core import check_experts


class Parameters(NamedTuple):
    """How many a model has, and how many of them compute one token."""

    total: int
    active: int


def sparse_layers(config: Config) -> int:
    """How many layers have experts."""
    return config.layers - config.dense_layers if config.experts else 0


def parameters(config: Config) -> Parameters:
    """All parameters of a model with experts, and those that a token goes through."""
    total = memory.parameter_count(config)
    e = config.experts
    one = memory.in_experts(config, Layout(dp=e, ep=e))  # of each layer
    return Parameters(total, total - (e - config.experts_per_token) * one)


def held(config: Config, ranks: int) -> int:
    """Parameters on each of `ranks` over which the experts are dealt out.

    Raises ValueError for ranks that do not divide the experts.
    """
    check_experts(config.experts, ranks)
    return sum(memory.parameters(config, Layout(dp=ranks, ep=ranks)).values())


def predicted_calls(config: Config) -> int:
    """All-to-alls of a step: sizes, dispatch and combine forward; dispatch and combine backward."""
    return 5 * sparse_layers(config)


def predicted_sent(
    config: Config, tokens: int, itemsize: int = 4, dropped: int = 0
) -> dict[str, int]:
    """Bytes that ranks hand to all-to-all in a step, for `tokens` of theirs, by purpose.

    Exact for all ranks together, of which `tokens` are the sum: each row is handed over once each
    way. A single rank's dispatch is exact, too; what it combines is what others chose to send it.
    "sizes" are those of one rank. dropped: choices without a place, of all layers. On the wire goes
    what stays on no rank: (N - 1) / N of it, if choices are even.
    """
    layers = sparse_layers(config)
    rows = tokens * config.experts_per_token * layers - dropped
    one = rows * config.hidden * itemsize
    return {"dispatch": 2 * one, "combine": 2 * one, "sizes": layers * config.experts * 8}


def padded(config: Config, tokens: int, fullest: int) -> float:
    """How many times the rows travel if each expert's are padded to those of the `fullest`.

    tokens: those of all ranks, of one layer.
    """
    return config.experts * fullest / (tokens * config.experts_per_token)


def wait(load_E: Sequence[float], ranks: int) -> float:
    """Rows of the fullest of `ranks` over those of the mean: so much longer the experts take."""
    check_experts(len(load_E), ranks)
    local_experts = len(load_E) // ranks
    each = [sum(load_E[rank * local_experts :][:local_experts]) for rank in range(ranks)]
    return max(each) * ranks / sum(each)
