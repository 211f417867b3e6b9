"""Formulas for experts: parameters held and used, bytes sent, and waiting time from uneven load.

E experts, k of them for each token, N ranks, T tokens of a rank, h hidden, e bytes an element.

    parameters of an expert     2 h F, or 3 h F with a gate, and its biases
    a rank holds                all other parameters, and E/N experts in each layer
    a token uses                all other parameters, and k experts in each layer
    one all-to-all              an input of T k h e bytes on a rank, if the load is balanced
    a layer's step              four all-to-alls: dispatch and combine, forward and backward
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardlab import memory
from shardlab.common.shapes import Config
from shardlab.layout import Layout

from .core import check_experts


class ParameterCounts(NamedTuple):
    """The parameter count of a model, in total and active for one token."""

    total: int
    active: int


def count_sparse_layers(config: Config) -> int:
    """Return the number of layers that have experts."""
    return config.layers - config.dense_layers if config.experts else 0


def count_parameters(config: Config) -> ParameterCounts:
    """Count all parameters of a model with experts, and those active for one token."""
    total = memory.count_parameters(config)
    e = config.experts
    one = memory.count_expert_parameters(config, Layout(dp=e, ep=e))  # of each layer
    return ParameterCounts(total, total - (e - config.experts_per_token) * one)


def count_held_parameters(config: Config, ranks: int) -> int:
    """Return the parameters on each of `ranks` ranks that shard the experts.

    Raises ValueError if the number of ranks does not divide the number of experts.
    """
    check_experts(config.experts, ranks)
    return sum(memory.count_rank_parameters(config, Layout(dp=ranks, ep=ranks)).values())


def predict_calls(config: Config) -> int:
    """Return a step's all-to-alls: sizes, dispatch, combine; in backward, dispatch and combine."""
    return 5 * count_sparse_layers(config)


def predict_sent_bytes(
    config: Config, tokens: int, itemsize: int = 4, dropped: int = 0
) -> dict[str, int]:
    """Return the bytes of the all-to-alls' inputs in a step with `tokens` tokens, by purpose.

    Exact for all ranks together, if `tokens` is the sum over ranks: each row is sent once in each
    direction. For a single rank, "dispatch" is exact, too; "combine" depends on the rows that the
    other ranks send to it. "sizes" counts one rank. dropped: dropped choices in all layers. With a
    balanced load, (N - 1) / N of the bytes leave their rank.
    """
    layers = count_sparse_layers(config)
    rows = tokens * config.experts_per_token * layers - dropped
    one = rows * config.hidden * itemsize
    return {"dispatch": 2 * one, "combine": 2 * one, "sizes": layers * config.experts * 8}


def padding_factor(config: Config, tokens: int, fullest: int) -> float:
    """Return the factor on rows sent if each expert's rows are padded to those of the `fullest`.

    tokens: the number of tokens of all ranks. fullest: the largest number of rows of an expert.
    """
    return config.experts * fullest / (tokens * config.experts_per_token)


def load_slowdown(load_E: Sequence[float], ranks: int) -> float:
    """Return the largest over the mean number of rows a rank: the experts' slowdown factor."""
    check_experts(len(load_E), ranks)
    local_experts = len(load_E) // ranks
    each = [sum(load_E[rank * local_experts :][:local_experts]) for rank in range(ranks)]
    return max(each) * ranks / sum(each)
