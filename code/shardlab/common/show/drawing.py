"""The course's drawing vocabulary: who holds what, and who sends what to whom.

A cell is a piece of a tensor. It has the colour of the rank whose numbers it holds, and as many
stripes as there are ranks whose numbers are summed in it. Lengths are inches, y grows downwards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from . import INK, RANK_COLORS, style

Cell = tuple[int, ...]  # the ranks whose numbers are in it; () for a cell that holds nothing
Point = tuple[float, float]
SIZE, GAP = 0.3, 0.09  # of a cell, and between the rows of a board


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty sheet of `width` x `height`."""
    style()
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def on(color: str) -> str:
    """Black or white, whichever reads better on `color` (relative luminance, WCAG 2.1)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def box(
    axes: Axes, x: float, y: float, width: float, height: float, words: str, color: str = "none"
) -> None:
    """A frame with words in it, filled with `color`."""
    axes.add_patch(Rectangle((x, y), width, height, fc=color, ec=INK, lw=0.8))
    ink = INK if color == "none" else on(color)
    axes.text(x + width / 2, y + height / 2, words, color=ink, ha="center", va="center")


def stripes(axes: Axes, x: float, y: float, width: float, height: float, holds: Cell) -> None:
    """The fill of a piece: one stripe for each rank whose numbers are in it."""
    for i, rank in enumerate(holds):
        tall = height / len(holds)
        axes.add_patch(Rectangle((x, y + i * tall), width, tall, color=RANK_COLORS[rank], lw=0))


def cell(
    axes: Axes, x: float, y: float, size: float, holds: Cell, label: str = "", new: bool = False
) -> None:
    """One piece; a broken outline if it is empty, a thick one if it is `new`."""
    stripes(axes, x, y, size, size, holds)
    outline: dict[str, Any] = {"ls": "-"} if holds else {"ls": (0, (2, 2)), "alpha": 0.5}
    thick = 2.2 if new else 0.8
    axes.add_patch(Rectangle((x, y), size, size, fill=False, ec=INK, lw=thick, **outline))
    if label:
        color = on(RANK_COLORS[holds[0]]) if len(holds) == 1 else INK
        axes.text(x + size / 2, y + size / 2, label, color=color, ha="center", va="center")


def board(
    axes: Axes,
    x: float,
    y: float,
    rows: Sequence[Sequence[Cell]],
    size: float = SIZE,
    gap: float = GAP,
    new: Collection[Point] = (),
    labels: Sequence[Sequence[str]] | None = None,
) -> None:
    """What all ranks hold: a row for each rank, a column for each piece."""
    for r, row in enumerate(rows):
        for c, holds in enumerate(row):
            label = labels[r][c] if labels else ""
            cell(axes, x + c * size, y + r * (size + gap), size, holds, label, (r, c) in new)


def names(
    axes: Axes, x: float, y: float, size: float = SIZE, gap: float = GAP, ranks: int = 4
) -> None:
    """The names of a board's rows, which end at x."""
    for rank in range(ranks):
        middle = y + rank * (size + gap) + size / 2
        axes.text(x, middle, f"rank {rank}", ha="right", va="center")


def arrow(axes: Axes, start: Point, end: Point, **changes: Any) -> None:
    """A message, or what becomes of something."""
    look = {"color": INK, "lw": 1.4, "mutation_scale": 12, **changes}
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", shrinkA=0, shrinkB=0, **look))


def words(axes: Axes, x: float, y: float, text: str, **changes: Any) -> None:
    """Words around (x, y)."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 10, **changes})


def title(axes: Axes, x: float, y: float, text: str, **changes: Any) -> None:
    """Bold words around (x, y)."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "weight": "bold", **changes})
