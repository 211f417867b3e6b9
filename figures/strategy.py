"""Draw the pictures of lesson `strategy`: python figures/strategy.py

Pictures of what the lesson computes itself are drawn by `shardlab.show.measured`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from shardlab import show
from shardlab.machines import MACHINES

HERE = Path(__file__).parent
COLORS = [show.RANK_COLORS[i] for i in (4, 5, 7)]  # places are no ranks: not the first four
CHIPS = "v100", "a100", "h100", "b200", "gb200", "rtx-4090"


def draw_walls() -> None:
    """Operations of a product that pay for one byte, from each place, on each chip."""
    show.style()
    figure, axes = plt.subplots(figsize=(4.6, 3.2))
    places = {
        "its memory": (lambda chip: chip.stream, "o"),
        "its node": (lambda chip: chip.inside, "s"),
        "the network": (lambda chip: chip.between, "D"),
    }
    for (name, (rate, shape)), color in zip(places.items(), COLORS, strict=True):
        worth = [MACHINES[chip].flops / rate(MACHINES[chip]) for chip in CHIPS]
        axes.semilogx(worth, range(len(CHIPS)), shape, color=color, markersize=7)
        for y, value in enumerate(worth):
            place = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
            axes.annotate(f"{value:,.0f}", (value, y), fontsize=9, **place)
        axes.text(worth[0], -0.85, name, ha="center", fontsize=9, color=color, fontweight="bold")
    axes.set_yticks(range(len(CHIPS)), [MACHINES[chip].name for chip in CHIPS])
    axes.set_ylim(len(CHIPS) - 0.5, -1.15)
    axes.set_xlim(40, 300_000)
    axes.set_xlabel("operations that pay for a byte from …")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    show.svg(
        figure,
        HERE / "strategy_walls.svg",
        "For six GPUs how many operations of a product pay for one byte, from its own memory, from "
        "the other GPUs of its node, and from the network. V100: 139, 833, 20,000. A100: 153, "
        "1,040, 12,480. H100: 295, 2,198, 19,780. B200: 281, 2,500, 45,000. GB200: 312, 2,778, "
        "50,000. RTX 4090: 164, 5,156, 105,600.",
    )


if __name__ == "__main__":
    draw_walls()
