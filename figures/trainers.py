"""Draw the pictures of the lesson `trainers` (python figures/trainers.py)."""

from __future__ import annotations

from pathlib import Path

from shardlab.common import show
from shardlab.common.show.drawing import (
    draw_arrow,
    draw_box,
    draw_rank_names,
    draw_text,
    draw_title,
    make_canvas,
)

HERE = Path(__file__).parent


def draw_scale() -> None:
    figure, axes = make_canvas(6.2, 2.5)
    top, tall, gap = 0.55, 0.5, 0.25
    columns = 0.8, 2.6, 4.5
    for x, text in zip(columns, ("its shard", "its flag", "after MAX"), strict=True):
        draw_title(axes, x + 0.7, 0.25, text)
    draw_rank_names(axes, columns[0] - 0.12, top, tall, gap, 2)
    for rank, (shard, flag, then) in enumerate(
        [("all finite", "0: step", "1: skip, halve"), ("an inf", "1: skip", "1: skip, halve")]
    ):
        y = top + rank * (tall + gap)
        color = show.RANK_COLORS[rank]
        for x, text in zip(columns, (shard, flag, then), strict=True):
            draw_box(axes, x, y, 1.4, tall, text, color if x == columns[0] else "none")
        draw_arrow(axes, (columns[0] + 1.44, y + tall / 2), (columns[1] - 0.04, y + tall / 2))
        draw_arrow(axes, (columns[1] + 1.44, y + tall / 2), (columns[2] - 0.04, y + tall / 2))
    draw_text(
        axes, 3.1, 2.2, "without the all-reduce rank 0 steps, rank 1 skips, and their scales differ"
    )
    show.save_svg(
        figure,
        HERE / "trainers_scale.svg",
        "Two ranks, each with a shard of the gradients. Rank 1's has an inf, so its flag is 1 and "
        "rank 0's is 0. After an all-reduce with MAX both flags are 1: both ranks skip the step "
        "and halve the scale.",
    )


if __name__ == "__main__":
    draw_scale()
