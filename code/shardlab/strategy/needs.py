"""How much memory the fullest rank of a layout needs, by the course's own model."""

from __future__ import annotations

from shardlab import memory
from shardlab.layout import Layout
from shardlab.shapes import Config


def peak(
    config: Config,
    layout: Layout,
    seq: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> int:
    """Bytes of the fullest rank at the fullest moment of a step, on a GPU: see `held`."""
    return held(config, layout, seq, precision, optimizer).peak


def held(
    config: Config,
    layout: Layout,
    seq: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> memory.Estimate:
    """What the fullest rank holds in a step, on a GPU: `memory.estimate` of that layout.

    seq: tokens of a sequence, by default the model's longest. Raises ValueError as that does, where
    the shape cannot be cut so.
    """
    return memory.estimate(config, layout, seq, precision, optimizer, device="gpu")
