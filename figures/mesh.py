"""Draw the pictures of the lesson `mesh` (python figures/mesh.py).

The docstring of a function that draws is the picture's alternative text.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import (
    draw_arrow,
    draw_text,
    draw_title,
    make_canvas,
    pick_text_color,
)

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
SMALL = 9  # points


def draw_step() -> Figure:
    """Timeline of what a rank of a 2 × 2 × 2 mesh sends in one step with two micro-batches. Tensor
    axis: it all-reduces B S H numbers several times in every layer, in forward and in backward.
    Pipeline axis: for each micro-batch it sends B S H numbers after the stage's last layer, and
    gets as many back. Data axis: it sends the gradients once, at the end.
    """
    figure, axes = make_canvas(6.5, 2.75)
    left, wide = 1.06, 0.98
    passes = [("F0", 0, 0.66), ("F1", 0.66, 0.66), ("B0", 1.32, 1.32), ("B1", 2.64, 1.32)]
    rows = {"computes": 0.5, "tensor": 1.0, "pipeline": 1.5, "data": 2.0}
    for name, y in rows.items():
        draw_text(
            axes, left - 0.12, y, name, ha="right", weight="bold" if name != "computes" else None
        )
        axes.plot((left, left + 5 * wide + 0.3), (y + 0.2, y + 0.2), color=INK, lw=0.5, alpha=0.4)
    for name, at, long in passes:
        x, size = left + at * wide, long * wide
        color = COLORS[4] if name[0] == "F" else COLORS[1]
        axes.add_patch(Rectangle((x + 0.02, 0.34), size - 0.04, 0.3, fc=color, ec=INK, lw=0.8))
        draw_text(axes, x + size / 2, 0.49, name, color=pick_text_color(color), fontsize=SMALL)
        for i in range(4):
            _draw_tick(axes, x + (i + 0.8) * size / 4.2, rows["tensor"], 0.05, COLORS[2])
        _draw_tick(axes, x + size - 0.05, rows["pipeline"], 0.09, COLORS[0])
    x = left + 4 * wide
    axes.add_patch(Rectangle((x + 0.08, rows["data"] - 0.13), wide, 0.27, fc=COLORS[3], ec=INK))
    draw_text(axes, x + 0.08 + wide / 2, rows["data"], "gradients", fontsize=SMALL, color="#000000")
    draw_title(axes, left, 0.15, "one rank, two layers, two micro-batches", ha="left", fontsize=10)
    draw_arrow(axes, (left, 2.42), (left + 5 * wide + 0.3, 2.42), lw=1.0)
    draw_text(axes, left + 2.6 * wide, 2.58, "time", fontsize=SMALL)
    draw_text(axes, left + 4.06 * wide, rows["tensor"], "4 per layer: sum of BSH", ha="left",
          fontsize=SMALL)  # fmt: skip
    draw_text(axes, left + 4.06 * wide, rows["pipeline"], "2 per stage: BSH", ha="left",
          fontsize=SMALL)  # fmt: skip
    return figure


def _draw_tick(axes, x: float, y: float, wide: float, color: str) -> None:
    axes.add_patch(Rectangle((x - wide / 2, y - 0.13), wide, 0.27, fc=color, ec=INK, lw=0.6))


def draw_norm() -> Figure:
    """Ranks that count a gradient in the norm, on two stages with two tensor ranks each. A shard of
    a matrix is on one rank, and counts there. LayerNorms and late biases are whole on both tensor
    ranks, and count on the first. The tied embedding is on both stages, and counts on the first.
    """
    figure, axes = make_canvas(5.8, 2.62)
    rows = (
        "embedding shard",
        "matrix shards",
        "LayerNorms, late biases",
        "tied head shard",
    )
    left, wide, tall = 1.82, 0.9, 0.36
    for stage in range(2):
        x = left + stage * (2 * wide + 0.3)
        draw_title(axes, x + wide, 0.15, f"stage {stage}", fontsize=10)
        for part in range(2):
            rank = 2 * stage + part
            at = x + part * wide
            draw_text(axes, at + wide / 2, 0.4, f"rank {rank}", fontsize=SMALL)
            for row, name in enumerate(rows):
                y = 0.58 + row * (tall + 0.1)
                if stage == part == 0:
                    draw_text(axes, left - 0.1, y + tall / 2, name, ha="right", fontsize=SMALL)
                if (row == 0 and stage) or (row == 3 and not stage):
                    continue
                counts = row < 2 or (row == 2 and part == 0)
                look = {"fc": COLORS[rank], "alpha": 1.0} if counts else {"fill": False}
                edge = {"ec": INK, "lw": 0.8, "ls": "-" if counts else (0, (2, 2))}
                axes.add_patch(Rectangle((at + 0.03, y), wide - 0.06, tall, **look, **edge))
                words = "counts" if counts else "not counted"
                ink = pick_text_color(COLORS[rank]) if counts else INK
                draw_text(axes, at + wide / 2, y + tall / 2, words, fontsize=SMALL, color=ink)
    return figure


def main() -> None:
    for name, draw in (("step", draw_step), ("norm", draw_norm)):
        alt = " ".join(draw.__doc__.split())
        show.save_svg(draw(), HERE / f"mesh_{name}.svg", alt)


if __name__ == "__main__":
    main()
