"""Functions that draw the tensors that ranks hold, and their messages.

A cell is a piece of a tensor. It has the colour of the rank whose values it holds, or a stripe for
each rank whose values are summed in it. Lengths are inches, and y grows downwards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from . import INK, RANK_COLORS, set_style

Cell = tuple[int, ...]  # the ranks whose values are in the cell; () for an empty cell
Point = tuple[float, float]
CELL_SIZE, ROW_GAP = 0.3, 0.09  # side of a cell and gap between the rows of a grid, in inches


def make_canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of `width` x `height`, with its axes."""
    set_style()
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def pick_text_color(background: str) -> str:
    """Return black or white, whichever contrasts more with `background` (WCAG 2.1)."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(background)
    ]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def draw_box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str = "none"
) -> None:
    """Draw a box with text in it, filled with `color`."""
    axes.add_patch(Rectangle((x, y), width, height, fc=color, ec=INK, lw=0.8))
    ink = INK if color == "none" else pick_text_color(color)
    axes.text(x + width / 2, y + height / 2, text, color=ink, ha="center", va="center")


def draw_stripes(axes: Axes, x: float, y: float, width: float, height: float, holds: Cell) -> None:
    """Fill a cell with one stripe for each rank whose values are in it."""
    for i, rank in enumerate(holds):
        tall = height / len(holds)
        axes.add_patch(Rectangle((x, y + i * tall), width, tall, color=RANK_COLORS[rank], lw=0))


def draw_cell(
    axes: Axes, x: float, y: float, size: float, holds: Cell, label: str = "", new: bool = False
) -> None:
    """Draw one cell, with a dashed outline if it is empty, and a thick one if it is `new`."""
    draw_stripes(axes, x, y, size, size, holds)
    outline: dict[str, Any] = {"ls": "-"} if holds else {"ls": (0, (2, 2)), "alpha": 0.5}
    thick = 2.2 if new else 0.8
    axes.add_patch(Rectangle((x, y), size, size, fill=False, ec=INK, lw=thick, **outline))
    if label:
        color = pick_text_color(RANK_COLORS[holds[0]]) if len(holds) == 1 else INK
        axes.text(x + size / 2, y + size / 2, label, color=color, ha="center", va="center")


def draw_grid(
    axes: Axes,
    x: float,
    y: float,
    rows: Sequence[Sequence[Cell]],
    size: float = CELL_SIZE,
    gap: float = ROW_GAP,
    new: Collection[Point] = (),
    labels: Sequence[Sequence[str]] | None = None,
) -> None:
    """Draw the cells of all ranks: a row for each rank, a column for each piece."""
    for r, row in enumerate(rows):
        for c, holds in enumerate(row):
            label = labels[r][c] if labels else ""
            draw_cell(axes, x + c * size, y + r * (size + gap), size, holds, label, (r, c) in new)


def draw_rank_names(
    axes: Axes, x: float, y: float, size: float = CELL_SIZE, gap: float = ROW_GAP, ranks: int = 4
) -> None:
    """Write "rank 0", "rank 1", … beside a grid's rows, right-aligned at x."""
    for rank in range(ranks):
        middle = y + rank * (size + gap) + size / 2
        axes.text(x, middle, f"rank {rank}", ha="right", va="center")


def draw_arrow(axes: Axes, start: Point, end: Point, **style: Any) -> None:
    """Draw an arrow, for a message or a transformation."""
    style = {"color": INK, "lw": 1.4, "mutation_scale": 12, **style}
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", shrinkA=0, shrinkB=0, **style))


def draw_text(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write text centred at (x, y)."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 10, **style})


def draw_title(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write bold text centred at (x, y)."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "weight": "bold", **style})
