"""The groups of any mesh, drawn: who is together along each axis, and who leaves a node."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import draw_text, draw_title, make_canvas, pick_text_color
from shardlab.layout import Layout

from .groups import panels, said

MOST = 64  # ranks that a picture can show
PIXELS = 96  # of an inch
MANY = 16  # above which cells have no numbers


def draw(layout: Layout, node: int) -> Figure:
    """Draw a panel for each axis, innermost first, with a column for each rank.

    Ranks of a group are joined by a line, which is dashed where it leaves a node of `node` ranks.
    Raises ValueError for nodes that the ranks do not fill, and for more ranks than can be drawn.
    """
    if layout.ranks % node:
        raise ValueError(f"node={node}: allowed are divisors of {layout.ranks} ranks")
    if layout.ranks > MOST:
        raise ValueError(f"ranks={layout.ranks}: allowed in a picture are {MOST} at most")
    shown = [axis for axis in reversed(layout.order) if getattr(layout, axis) > 1]
    few = layout.ranks <= MANY
    found = panels(
        layout.ranks,
        node,
        {axis: layout.groups(axis) for axis in shown},
        {axis: said(layout, axis, node) for axis in shown},
        *((26, 6) if few else (10, 3)),
    )
    figure, axes = make_canvas(found.wide / PIXELS, found.high / PIXELS)
    axes.set(xlim=(0, found.wide), ylim=(found.high, 0))
    for x, y, text, place in found.words:
        put = draw_title if place == "start" else draw_text
        put(axes, x, y, text, ha={"start": "left"}.get(place, "center"), fontsize=9)
    for x, y, wide, high in found.frames:
        look = {"fill": False, "ec": show.INK, "lw": 0.8, "alpha": 0.5}
        axes.add_patch(Rectangle((x, y), wide, high, **look))
    for begin, end, y, leaves in found.links:
        look = {"ls": (0, (2, 1.5)) if leaves else "-", "lw": 1.6, "color": show.INK, "zorder": 0}
        axes.plot((begin, end), (y, y), **look)
    for x, y, rank in found.cells:
        color, half = show.RANK_COLORS[rank % len(show.RANK_COLORS)], found.size / 2
        look = {"fc": color, "ec": show.INK, "lw": 0.8}
        axes.add_patch(Rectangle((x, y), found.size, found.size, **look))
        if few:
            draw_text(axes, x + half, y + half, str(rank), color=pick_text_color(color), fontsize=9)
    return figure


def alt(layout: Layout, node: int) -> str:
    """Describe in words what `draw` shows."""
    told = [
        f"{said(layout, axis, node)}: " + ", ".join(str(group) for group in layout.groups(axis)[:8])
        for axis in reversed(layout.order)
        if getattr(layout, axis) > 1
    ]
    return f"{layout.ranks} ranks in nodes of {node}. " + ". ".join(told) + "."
