"""Draw the legend of the course's pictures for the notation page (python figures/notation.py)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from shardlab import pipeline
from shardlab.common import show
from shardlab.common.show.drawing import (
    draw_cell,
    draw_text,
    draw_title,
    make_canvas,
    pick_text_color,
)
from shardlab.pipeline import Span
from shardlab.pipeline.timeline_figure import IDLE_STYLE, draw_rows, make_box

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
SIZE = 0.3


def draw_entry(axes: Axes, x: float, y: float, text: str) -> None:
    """Draw a text to the right of a cell at (x, y)."""
    draw_text(axes, x + SIZE + 0.1, y + SIZE / 2, text, ha="left")


def draw_legend() -> None:
    figure, axes = make_canvas(4.4, 5.1)
    left, half = 0.05, 2.15
    draw_title(axes, left, 0.12, "ranks", ha="left")
    for rank, color in enumerate(COLORS):
        place = (left + rank * 0.42, 0.3)
        draw_cell(axes, *place, SIZE, (rank,))
        middle = place[0] + SIZE / 2, place[1] + SIZE / 2
        draw_text(axes, *middle, str(rank), color=pick_text_color(color))
    draw_title(axes, left, 0.9, "a piece of a tensor", ha="left")
    for i, (holds, new, text) in enumerate(
        (
            ((1,), False, "numbers of rank 1"),
            ((0, 1, 2, 3), False, "a sum over four ranks"),
            ((), False, "empty: on other ranks"),
            ((2,), True, "new in this step"),
        )
    ):
        x, y = left + half * (i % 2), 1.08 + 0.42 * (i // 2)
        draw_cell(axes, x, y, SIZE, holds, new=new)
        draw_entry(axes, x, y, text)
    axes.add_patch(Rectangle((left, 1.92), SIZE, SIZE, fc=INK, alpha=0.16, lw=0))
    axes.add_patch(Rectangle((left, 1.92), SIZE, SIZE, fill=False, ec=INK, lw=0.8))
    draw_entry(axes, left, 1.92, "pale: the same on every rank")
    draw_title(axes, left, 2.56, "kinds of bytes", ha="left")
    kinds = ("weights", "gradients", "optimizer states", "activations")
    for i, (color, text) in enumerate(zip(COLORS[4:8], kinds, strict=True)):
        x, y = left + half * (i % 2), 2.74 + 0.42 * (i // 2)
        axes.add_patch(Rectangle((x, y), SIZE, SIZE, fc=color, ec=INK, lw=0.8))
        draw_entry(axes, x, y, text)
    draw_title(axes, left, 3.8, "time, to the right", ha="left")
    shown = pipeline.simulate(pipeline.make_schedule("gpipe", 2, 3))
    draw_rows(axes, shown, left, 4.05, 0.17)
    x, y = left + half + 0.2, 3.93
    for i, (kind, text) in enumerate({"F": "forward", "B": "backward"}.items()):
        for color, corners in make_box(x, y + 0.36 * i, SIZE, 0.26, Span(kind, 0, 0, 0, 0)):
            axes.add_patch(Polygon(corners, fc=color, ec=INK, lw=0.6))
        draw_entry(axes, x, y + 0.36 * i - 0.02, text)
    axes.add_patch(Rectangle((x, y + 0.72), SIZE, 0.26, **IDLE_STYLE))
    draw_entry(axes, x, y + 0.7, "idle")
    show.save_svg(
        figure,
        HERE / "notation_legend.svg",
        "The legend of the course's pictures. Ranks 0 to 7 have a colour each: blue, orange, "
        "green, pink, light blue, red, yellow, grey. A piece of a tensor has the colour of the "
        "rank whose numbers it holds; a stripe for each rank where they are summed; a dashed "
        "outline where other ranks hold it; a thick outline where it is new in this step; and it "
        "is pale where it is the same on every rank. In pictures of memory, weights are light "
        "blue, gradients red, optimizer states yellow, activations grey. In timelines a forward "
        "is a plain box in light blue, a backward a red box with cut corners and a yellow foot, "
        "and where a rank idles its row is pale.",
    )


if __name__ == "__main__":
    draw_legend()
