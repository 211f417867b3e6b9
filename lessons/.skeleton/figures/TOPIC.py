"""Draw the pictures of lesson `TOPIC`: python figures/TOPIC.py"""

from __future__ import annotations

from pathlib import Path

from shardlab.common import show
from shardlab.common.show.drawing import arrow, board, canvas, names, title

HERE = Path(__file__).parent


def draw_mean() -> None:
    figure, axes = canvas(4.2, 1.95)
    names(axes, 0.75, 0.35)
    board(axes, 0.85, 0.35, [[(rank,)] * 3 for rank in range(4)])
    arrow(axes, (2.0, 1.1), (3.0, 1.1))
    board(axes, 3.3, 0.35, [[(0, 1, 2, 3)]] * 4)
    title(axes, 1.3, 0.15, "before")
    title(axes, 3.45, 0.15, "after")
    words = "Before, each of four ranks holds numbers of its own; after, all hold the same mean."
    show.svg(figure, HERE / "TOPIC_mean.svg", words)


if __name__ == "__main__":
    draw_mean()
