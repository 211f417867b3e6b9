"""Pictures of the groups of any mesh, which mark the groups that leave a node."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import draw_text, draw_title, make_canvas, pick_text_color
from shardlab.layout import Layout

from .groups import describe_axis, lay_out_panels

MAX_RANKS = 64  # ranks that a picture can show
PIXELS_PER_INCH = 96
MAX_NUMBERED_RANKS = 16  # with more ranks, cells have no numbers


def draw_groups(layout: Layout, node: int) -> Figure:
    """Draw a panel for each axis, innermost first, with a column for each rank.

    Ranks of a group are joined by a line, which is dashed where it leaves a node of `node` ranks.
    Raises ValueError for nodes that the ranks do not fill, and for more ranks than can be drawn.
    """
    if layout.world_size % node:
        raise ValueError(f"node={node}: must divide the {layout.world_size} ranks")
    if layout.world_size > MAX_RANKS:
        raise ValueError(f"ranks={layout.world_size}: must be at most {MAX_RANKS} in a picture")
    shown = [axis for axis in reversed(layout.order) if getattr(layout, axis) > 1]
    few = layout.world_size <= MAX_NUMBERED_RANKS
    found = lay_out_panels(
        layout.world_size,
        node,
        {axis: layout.list_groups(axis) for axis in shown},
        {axis: describe_axis(layout, axis, node) for axis in shown},
        *((26, 6) if few else (10, 3)),
    )
    figure, axes = make_canvas(found.width / PIXELS_PER_INCH, found.height / PIXELS_PER_INCH)
    axes.set(xlim=(0, found.width), ylim=(found.height, 0))
    for x, y, text, place in found.labels:
        put = draw_title if place == "start" else draw_text
        put(axes, x, y, text, ha={"start": "left"}.get(place, "center"), fontsize=9)
    for x, y, wide, high in found.frames:
        look = {"fill": False, "ec": show.INK, "lw": 0.8, "alpha": 0.5}
        axes.add_patch(Rectangle((x, y), wide, high, **look))
    for begin, end, y, leaves in found.links:
        look = {"ls": (0, (2, 1.5)) if leaves else "-", "lw": 1.6, "color": show.INK, "zorder": 0}
        axes.plot((begin, end), (y, y), **look)
    for x, y, rank in found.cells:
        color, half = show.RANK_COLORS[rank % len(show.RANK_COLORS)], found.cell_size / 2
        look = {"fc": color, "ec": show.INK, "lw": 0.8}
        axes.add_patch(Rectangle((x, y), found.cell_size, found.cell_size, **look))
        if few:
            draw_text(axes, x + half, y + half, str(rank), color=pick_text_color(color), fontsize=9)
    return figure


def write_alt_text(layout: Layout, node: int) -> str:
    """Describe in words the picture of `draw_groups`."""
    texts = [
        f"{describe_axis(layout, axis, node)}: " + ", ".join(map(str, layout.list_groups(axis)[:8]))
        for axis in reversed(layout.order)
        if getattr(layout, axis) > 1
    ]
    return f"{layout.world_size} ranks in nodes of {node}. " + ". ".join(texts) + "."
