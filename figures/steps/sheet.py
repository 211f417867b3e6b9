"""Parts shared by the step-through pictures: one size of sheet, small files, one folder.

A picture in steps is a file for each step, `<topic>_<number>.svg`, which a lesson shows with the
directive `step-through` (book/_ext/directives.py). All sheets of a topic have one size, so that
only the changing parts differ from step to step. Lengths are inches, y grows downwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from shardlab.common import show
from shardlab.common.show.drawing import Cell

HERE = Path(__file__).parent
INK = show.INK
Place = tuple[float, float, float, float]  # left, top, width, height
EMPTY = {"fc": "none", "ec": INK, "lw": 0.7, "ls": (0, (2, 2)), "alpha": 0.5}


def draw_boxes(axes: Axes, places: Iterable[Place], **look: object) -> None:
    """Draw boxes of one style as one path: one path a box would make the file ten times larger."""
    corners = [
        [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high), (x, y)]
        for x, y, wide, high in places
    ]
    if corners:
        outlines = Outline.make_compound_path(*(Outline(c, closed=True) for c in corners))
        axes.add_patch(PathPatch(outlines, clip_on=False, **look))


def draw_cells(axes: Axes, held: Iterable[tuple[Place, Cell]], new: Iterable[Place] = ()) -> None:
    """Draw pieces as `show.drawing.draw_cell` does: one stripe for each rank in a piece."""
    listed = list(held)
    fills: dict[str, list[Place]] = {}
    for (x, y, wide, high), ranks in listed:
        for i, rank in enumerate(ranks):
            tall = high / len(ranks)
            stripe = (x, y + i * tall, wide, tall)
            fills.setdefault(show.RANK_COLORS[rank], []).append(stripe)
    for color, stripes in fills.items():
        draw_boxes(axes, stripes, fc=color, lw=0)
    draw_boxes(axes, [place for place, ranks in listed if not ranks], **EMPTY)
    draw_boxes(axes, [place for place, ranks in listed if ranks], fc="none", ec=INK, lw=0.8)
    draw_boxes(axes, new, fc="none", ec=INK, lw=2.2)


def save_step(figure: Figure, topic: str, number: int, alt: str) -> None:
    """Write the picture of a step as a small file."""
    path = HERE / f"{topic}_{number}.svg"
    show.save_svg(figure, path, alt)
    path.write_text(shrink_svg(path.read_text("utf-8")), "utf-8")


_TURNED = re.compile(r' transform="rotate\(-0 [^"]*\)"')
_ALONE = re.compile(r"<g>\s*(?:<!-- .*? -->\s*)?(<(?:text|path)\b[^>]*>(?:[^<]*</text>)?)\s*</g>")
_BOX = re.compile(  # closed by a line or not; x, y of two corners
    r"M ([\d.]+) ([\d.]+) \nL ([\d.]+) \2 \nL \3 ([\d.]+) \nL \1 \4 \n(?:L \1 \2 \n)?z\s*"
)
_LONG = re.compile(r"(\d+\.\d\d)\d+")


def shrink_svg(text: str) -> str:
    """Return an equivalent SVG with a third of matplotlib's characters."""

    def shorten_box(corners: re.Match[str]) -> str:
        x, y, right, foot = map(float, corners.groups())
        return f"M{x:g} {y:g}h{right - x:.5g}v{foot - y:.5g}h{x - right:.5g}z"

    text = _LONG.sub(r"\1", _BOX.sub(shorten_box, _TURNED.sub("", text)))
    text = re.sub(r" \n([LCQM]) ", r"\1", text)
    for words in ("stroke-dashoffset: 0; ", "; stroke-linejoin: miter", "font-family: inherit; "):
        text = text.replace(words, "")
    text = re.sub(r'style="[^"]*"', lambda style: re.sub(r"(?<=[;:]) ", "", style[0]), text)
    text = re.sub(r"<defs>\s*</defs>", "", _ALONE.sub(r"\1", text))
    return re.sub(r"\n\s+", "\n", text)
