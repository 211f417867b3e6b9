"""The groups of any mesh, drawn: who is together along each axis, and who leaves a node."""

from __future__ import annotations

from itertools import pairwise

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardlab import show
from shardlab.arguments import check_whole
from shardlab.layout import Layout
from shardlab.show.drawing import canvas, on, title, words

from .groups import packed, said

MOST = 64  # ranks that a picture can show
MANY = 16  # above which cells have no numbers


def draw(layout: Layout, node: int) -> Figure:
    """A panel for each axis, innermost first, and a column for each rank.

    Ranks of a group are joined by a line, which is dashed where it leaves a node of `node` ranks.
    Raises ValueError for nodes that the ranks do not fill, and for more ranks than can be drawn.
    """
    check_whole(node=node)
    if layout.ranks % node:
        raise ValueError(f"node={node}: allowed are divisors of {layout.ranks} ranks")
    if layout.ranks > MOST:
        raise ValueError(f"ranks={layout.ranks}: allowed in a picture are {MOST} at most")
    few = layout.ranks <= MANY
    size, gap = (0.27, 0.06) if few else (0.1, 0.03)
    left, top, panel, apart = 0.1, 0.3, 0.42, 0.16
    shown = [axis for axis in reversed(layout.order) if getattr(layout, axis) > 1]
    rows = {axis: packed(layout.groups(axis)) for axis in shown}

    def x(rank: int) -> float:
        return left + rank * (size + gap) + rank // node * apart

    width = max(x(layout.ranks - 1) + size + left, 3.3)
    tall = {axis: len(rows[axis]) * (size + gap) - gap for axis in shown}
    figure, axes = canvas(width, top + sum(tall.values()) + len(shown) * panel)
    for number in range(layout.ranks // node):
        middle = (x(number * node) + x(number * node + node - 1) + size) / 2
        words(axes, middle, 0.14, f"node {number}" if few else str(number), fontsize=9)
    y = top
    for axis in shown:
        title(axes, left - 0.05, y + 0.1, said(layout, axis, node), ha="left", fontsize=9)
        y += panel - 0.12
        for number in range(layout.ranks // node):
            begin, end = x(number * node), x(number * node + node - 1) + size
            look = {"fill": False, "ec": show.INK, "lw": 0.8, "alpha": 0.5}
            corner = begin - 0.05, y - 0.05
            axes.add_patch(Rectangle(corner, end - begin + 0.1, tall[axis] + 0.1, **look))
        for row in rows[axis]:
            middle = y + size / 2
            for rank, after in (pair for group in row for pair in pairwise(group)):
                dashes = (0, (2, 1.5)) if rank // node != after // node else "-"
                look = {"ls": dashes, "lw": 1.6, "color": show.INK, "zorder": 0}
                axes.plot((x(rank) + size, x(after)), (middle, middle), **look)
            for rank in sum(row, []):
                color = show.RANK_COLORS[rank % len(show.RANK_COLORS)]
                look = {"fc": color, "ec": show.INK, "lw": 0.8}
                axes.add_patch(Rectangle((x(rank), y), size, size, **look))
                if few:
                    words(axes, x(rank) + size / 2, middle, str(rank), color=on(color), fontsize=9)
            y += size + gap
        y += 0.12 - gap
    return figure


def alt(layout: Layout, node: int) -> str:
    """What `draw` shows, in words."""
    told = [
        f"{said(layout, axis, node)}: " + ", ".join(str(group) for group in layout.groups(axis)[:8])
        for axis in reversed(layout.order)
        if getattr(layout, axis) > 1
    ]
    return f"{layout.ranks} ranks in nodes of {node}. " + ". ".join(told) + "."
