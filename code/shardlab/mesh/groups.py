"""The groups of a layout as text, in rows, and as the lines and boxes of a drawing.

For the command, the lesson's pictures and the browser's calculator: only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardlab.layout import Layout

AXIS_NAMES = {"dp": "data", "pp": "pipeline", "cp": "context", "tp": "tensor"}


def describe_axis(layout: Layout, axis: str, node: int) -> str:
    """Describe an axis in one line: its groups, their size, and how many leave their node."""
    groups = layout.list_groups(axis)
    beyond = sum(len({rank // node for rank in group}) > 1 for group in groups)
    texts = {0: "none leaves its node", len(groups): "all leave their node"}
    text = texts.get(beyond, f"{beyond} of them leave their node")
    return f"{AXIS_NAMES[axis]}: {len(groups)} × {getattr(layout, axis)} ranks, {text}"


def pack_rows(groups: list[list[int]]) -> list[list[list[int]]]:
    """Arrange groups in as few rows as possible, so that no two groups in a row overlap."""
    rows: list[list[list[int]]] = []
    for group in sorted(groups):
        free = [row for row in rows if row[-1][-1] < group[0]]
        if free:
            free[0].append(group)
        else:
            rows.append([group])
    return rows


class PanelDrawing(NamedTuple):
    """A picture in pixels, y downwards: a panel for each axis, a column for each rank."""

    width: float
    height: float
    cell_size: float  # of a rank's cell
    labels: list[tuple[float, float, str, str]]  # x, y of the middle, text, "start" or "middle"
    frames: list[tuple[float, float, float, float]]  # x, y, wide, high: nodes
    links: list[tuple[float, float, float, bool]]  # x from, x to, y, whether it leaves its node
    cells: list[tuple[float, float, int]]  # x, y, rank


def lay_out_panels(
    ranks: int,
    node: int,
    groups: Mapping[str, Sequence[list[int]]],
    titles: Mapping[str, str],
    size: float = 24.0,
    gap: float = 5.0,
) -> PanelDrawing:
    """Lay out the groups of each axis under its title, on nodes of `node` ranks."""

    def get_x(rank: int) -> float:
        return 9 + rank * (size + gap) + rank // node * 15

    nodes = [(get_x(n), get_x(n + node - 1) + size) for n in range(0, ranks, node)]
    head = "node " if size >= 20 else ""
    words = [((a + b) / 2, 12.0, f"{head}{n}", "middle") for n, (a, b) in enumerate(nodes)]
    frames, links, cells, y = [], [], [], 24.0
    for axis, each in groups.items():
        words.append((4.0, y + 12, titles[axis], "start"))
        y += 30
        rows = pack_rows(list(each))
        tall = len(rows) * (size + gap) - gap
        frames += [(a - 5, y - 5, b - a + 10, tall + 10) for a, b in nodes]
        for row in rows:
            for group in row:
                for a, b in zip(group, group[1:], strict=False):
                    links.append((get_x(a) + size, get_x(b), y + size / 2, a // node != b // node))
                cells += [(get_x(rank), y, rank) for rank in group]
            y += size + gap
        y += 11 - gap
    wide = max(get_x(ranks - 1) + size + 9, 320)
    return PanelDrawing(wide, y, size, words, frames, links, cells)
