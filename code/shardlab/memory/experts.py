"""What a layer with experts holds: its parameters, and what it keeps for its backward.

E experts of width F, k of them for each of bs tokens, c ranks that deal them out, t tensor degree,
e bytes an element; letters else as in `core`. What is kept, if choices are even:

    router       scores bsE in float32; of each choice its number and its weight
    rows         what each chosen expert gets, and what it gives: 2kbshe
    experts      their wide tensors, as a feed-forward network's, k times
    shared       the same once, for their joint width

Experts dealt out over c ranks leave E/c on each, and as many rows as before: those that go are as
many as those that come.
"""

from __future__ import annotations

from shardlab.common.shapes import Config

from .core import Sizes, wide_tensors

INTEGER, FLOAT = 8, 4  # bytes


def kept_by_rows(config: Config, z: Sizes) -> int:
    """What a token's experts get, and what they give back."""
    return 2 * config.experts_per_token * z.stream


def kept_by_experts(config: Config, z: Sizes, again: bool = False) -> int:
    """Bytes that a layer's router and experts keep; again: nonlinearities are recomputed.

    Without shared experts nothing of a token is kept but what its own experts keep.
    """
    router = kept_by_router(config, z.tokens // FLOAT, z.element)
    return kept_by_rows(config, z) + wide_tensors(config, again) * z.chosen + router


def kept_by_router(config: Config, tokens: int, element: int) -> int:
    """Scores of all experts, and of each choice its place and its weight."""
    choices = tokens * config.experts_per_token
    scores = tokens * config.experts * FLOAT
    # Which experts; where the rows of each stand in batch, sequence and choices.
    places = choices * (1 + 3) * INTEGER
    # Chosen scores, and their sum; their quotient, as the rows' dtype has it.
    weights = choices * FLOAT + tokens * FLOAT + choices * element
    return scores + places + weights


def backward_of_experts(config: Config, tokens: int, element: int, tp: int = 1) -> int:
    """Bytes that backward adds while it is at one expert: gradients of rows and of wide tensors."""
    rows = -(-tokens * config.experts_per_token // config.experts)
    inside = (3 if config.mlp == "swiglu" else 2) * rows * config.expert_width // tp
    return (2 * rows * config.hidden + inside) * element
