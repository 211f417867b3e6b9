"""The groups of any mesh, drawn: who is together along each axis, and who leaves a node."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import canvas, on, title, words
from shardlab.layout import Layout

from .groups import said

MOST = 64  # ranks that a picture can show
PIXELS = 96  # of an inch
MANY = 16  # above which cells have no numbers


def draw(layout: Layout, node: int) -> Figure:
    """A panel for each axis, innermost first, and a column for each rank.

    Ranks of a group are joined by a line, which is dashed where it leaves a node of `node` ranks.
    Raises ValueError for nodes that the ranks do not fill, and for more ranks than can be drawn.
    """
    if layout.ranks % node:
        raise ValueError(f"node={node}: allowed are divisors of {layout.ranks} ranks")
    if layout.ranks > MOST:
        raise ValueError(f"ranks={layout.ranks}: allowed in a picture are {MOST} at most")
    few = layout.ranks <= MANY
    size, gap = (26, 6) if few else (10, 3)  # of a cell, in pixels

    def left(rank: int) -> float:
        return 9 + rank * (size + gap) + rank // node * 15

    shown = [axis for axis in reversed(layout.order) if getattr(layout, axis) > 1]
    panels = {axis: packed(layout.groups(axis)) for axis in shown}
    wide = max(left(layout.ranks - 1) + size + 9, 320)
    high = 24 + sum(41 - gap + len(rows) * (size + gap) for rows in panels.values())
    figure, axes = canvas(wide / PIXELS, high / PIXELS)
    axes.set(xlim=(0, wide), ylim=(high, 0))
    nodes = [(left(n), left(n + node - 1) + size) for n in range(0, layout.ranks, node)]
    for number, (begin, end) in enumerate(nodes):
        words(axes, (begin + end) / 2, 12, f"{'node ' * few}{number}", fontsize=9)
    y = 24
    for axis, rows in panels.items():
        title(axes, 4, y + 12, said(layout, axis, node), ha="left", fontsize=9)
        y += 30
        for begin, end in nodes:
            frame = begin - 5, y - 5, end - begin + 10, len(rows) * (size + gap) - gap + 10
            _rectangle(axes, *frame, fill=False, alpha=0.5)
        for row in rows:
            for group in row:
                _draw_group(axes, group, [left(rank) for rank in group], y, size, node, few)
            y += size + gap
        y += 11 - gap
    return figure


def _draw_group(
    axes: Axes, group: list[int], lefts: list[float], y: float, size: int, node: int, few: bool
) -> None:
    """Draw the cells of a group and the lines that join them."""
    middle = y + size / 2
    for n in range(len(group) - 1):
        leaves = group[n] // node != group[n + 1] // node
        look = {"ls": (0, (2, 1.5)) if leaves else "-", "lw": 1.6, "color": show.INK, "zorder": 0}
        axes.plot((lefts[n] + size, lefts[n + 1]), (middle, middle), **look)
    for rank, x in zip(group, lefts, strict=True):
        color = show.RANK_COLORS[rank % len(show.RANK_COLORS)]
        _rectangle(axes, x, y, size, size, fc=color)
        if few:
            words(axes, x + size / 2, middle, str(rank), color=on(color), fontsize=9)


def _rectangle(axes: Axes, x: float, y: float, wide: float, high: float, **look: Any) -> None:
    axes.add_patch(Rectangle((x, y), wide, high, ec=show.INK, lw=0.8, **look))


def packed(groups: list[list[int]]) -> list[list[list[int]]]:
    """Groups in as few rows as let none pass over another."""
    rows: list[list[list[int]]] = []
    for group in sorted(groups):
        free = [row for row in rows if row[-1][-1] < group[0]]
        if free:
            free[0].append(group)
        else:
            rows.append([group])
    return rows


def alt(layout: Layout, node: int) -> str:
    """What `draw` shows, in words."""
    told = [
        f"{said(layout, axis, node)}: " + ", ".join(str(group) for group in layout.groups(axis)[:8])
        for axis in reversed(layout.order)
        if getattr(layout, axis) > 1
    ]
    return f"{layout.ranks} ranks in nodes of {node}. " + ". ".join(told) + "."
