"""Draw the pictures of the lesson `checkpoint` (python figures/checkpoint.py)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import (
    draw_arrow,
    draw_box,
    draw_title,
    make_canvas,
    pick_text_color,
)

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS


def _draw_piece(
    axes: Axes, x: float, y: float, width: float, height: float, color: str, words: str = ""
) -> None:
    axes.add_patch(Rectangle((x, y), width, height, fc=color, ec=INK, lw=0.8))
    style = {"ha": "center", "va": "center", "fontsize": 10, "color": pick_text_color(color)}
    axes.text(x + width / 2, y + height / 2, words, **style)


def draw_shards() -> None:
    figure, axes = make_canvas(6.2, 4.75)
    width, gap, left = 1.3, 0.2, 0.2
    places = [left + r * (width + gap) for r in range(4)]
    for rank, x in enumerate(places):
        draw_title(axes, x + width / 2, 0.15, f"rank {rank}")
        _draw_piece(axes, x, 0.32, width, 0.62, COLORS[rank], "quarter of\nall tensors")
        draw_arrow(axes, (x + width / 2, 0.98), (x + width / 2, 1.6))
    axes.text(left, 1.29, "save", va="center", ha="left", weight="bold")
    folder = Rectangle((0.06, 1.66), 6.08, 1.12, fill=False, ec=INK, lw=1.4, ls=(0, (4, 2)))
    axes.add_patch(folder)
    for rank, x in enumerate(places):
        _draw_piece(axes, x, 1.78, width, 0.42, COLORS[rank], f"__{rank}_0.distcp")
    words = ".metadata: which part of which tensor is in which file"
    draw_box(axes, places[0], 2.28, 4 * width + 3 * gap, 0.4, words)
    halves = 2 * width + gap
    for rank in range(2):
        x = left + rank * (halves + gap)
        for part in range(2):
            source = 2 * rank + part
            middle = places[source] + width / 2
            draw_arrow(axes, (middle, 2.82), (middle, 3.5))
            _draw_piece(axes, x + part * halves / 2, 3.54, halves / 2, 0.5, COLORS[source])
        outline = Rectangle((x, 3.54), halves, 0.5, fill=False, ec=COLORS[rank], lw=4)
        axes.add_patch(outline)
        draw_title(axes, x + halves / 2, 4.22, f"rank {rank} of 2: half of all tensors")
    axes.text(left, 3.16, "load", va="center", ha="left", weight="bold")
    words = "Each rank reads its parts from all files; no rank gathers the full tensors."
    axes.text(3.1, 4.56, words, ha="center", va="center", fontsize=10)
    show.save_svg(
        figure,
        HERE / "checkpoint_shards.svg",
        "Four ranks each write their quarter of all tensors into a file of their own, beside an "
        "index. Later two ranks read: rank 0 the files of ranks 0 and 1, rank 1 those of ranks 2 "
        "and 3. Each then holds half of all tensors.",
    )


def draw_rename() -> None:
    figure, axes = make_canvas(6.2, 4.1)
    steps = [
        (0.0, 0.8, "clean up,\nnew folder"),
        (0.8, 2.3, "all ranks write\nand fsync"),
        (2.3, 3.3, "checksums,\nmanifest"),
        (3.55, 4.45, "delete\nold one"),
    ]
    left = 1.25
    draw_title(axes, left - 0.12, 0.42, "a save", ha="right")
    for begin, end, words in steps:
        draw_box(axes, left + begin, 0.18, end - begin, 0.5, "")
        style = {"ha": "center", "va": "center", "fontsize": 9.5}
        axes.text(left + (begin + end) / 2, 0.43, words, **style)
    moment = left + 3.42
    axes.plot([moment, moment], [0.0, 3.05], color=INK, lw=2.2)
    axes.text(moment, 3.2, "rename", ha="center", va="center", weight="bold")

    rows = [
        ("000006-step-500", 0.0, 3.65, COLORS[0], True),
        (".saving-000007-step-600", 0.7, 3.42, COLORS[4], False),
        ("000007-step-600", 3.42, 4.45, COLORS[4], True),
    ]
    tops = [1.05, 1.7, 2.35]
    axes.text(left - 0.12, 1.24, "complete", ha="right", va="center")
    axes.text(left - 0.12, 1.89, "incomplete", ha="right", va="center")
    axes.text(left - 0.12, 2.54, "complete", ha="right", va="center")
    for (name, begin, end, color, whole), y in zip(rows, tops, strict=True):
        look = {"fc": color, "ec": INK, "lw": 0.8}
        if not whole:
            look = {"fc": "none", "ec": color, "lw": 2, "ls": (0, (3, 2))}
        axes.add_patch(Rectangle((left + begin, y), end - begin, 0.38, **look))
        ink = pick_text_color(color) if whole else INK
        short = "…7-step-600" if whole and begin > 3 else name
        style = {"ha": "center", "va": "center", "fontsize": 9.5, "color": ink}
        axes.text(left + (begin + end) / 2, y + 0.19, short, **style)
    both = {"arrowstyle": "<->", "color": INK}
    axes.annotate("", (left, 3.55), (moment - 0.08, 3.55), arrowprops=both)
    axes.text((left + moment) / 2, 3.75, "killed here: step 500 is current", ha="center")
    axes.annotate("", (moment + 0.08, 3.55), (6.15, 3.55), arrowprops=both)
    axes.text((moment + 6.15) / 2, 3.75, "here: step 600", ha="center")
    show.save_svg(
        figure,
        HERE / "checkpoint_rename.svg",
        "Timeline of a save. The folder of step 500 stays complete while the ranks write step 600 "
        "into a folder whose name begins with .saving. One rename makes the new folder complete. "
        "Only then the old one is deleted. After a kill before the rename, step 500 is the "
        "current checkpoint; after a kill later, step 600.",
    )


def draw_async() -> None:
    figure, axes = make_canvas(6.2, 3.3)
    left, unit = 1.2, 0.62

    def draw_row(y: float, words: str) -> None:
        axes.text(left - 0.12, y + 0.2, words, ha="right", va="center")

    def draw_steps(y: float, start: float, count: int, first: int) -> None:
        for i in range(count):
            x = left + unit * (start + i)
            _draw_piece(axes, x, y, unit * 0.96, 0.4, COLORS[0], f"{first + i}")

    draw_title(axes, 0.05, 0.16, "synchronous", ha="left")
    draw_row(0.36, "training")
    draw_steps(0.36, 0, 2, 1)
    draw_steps(0.36, 5, 3, 3)
    draw_row(0.86, "writing")
    _draw_piece(axes, left + 2 * unit, 0.86, 3 * unit, 0.4, COLORS[4], "write")
    style = {"ha": "center", "va": "center", "fontsize": 10}
    axes.text(left + 3.5 * unit, 0.56, "waits", **style)

    draw_title(axes, 0.05, 1.66, "in the background", ha="left")
    draw_row(1.86, "training")
    draw_steps(1.86, 0, 2, 1)
    draw_steps(1.86, 2.5, 5, 3)
    _draw_piece(axes, left + 2 * unit, 1.86, 0.47 * unit, 0.4, COLORS[7])
    draw_row(2.36, "writing")
    _draw_piece(axes, left + 2.5 * unit, 2.36, 3 * unit, 0.4, COLORS[4], "write the copy")
    draw_arrow(axes, (left + 2.23 * unit, 2.95), (left + 2.23 * unit, 2.3))
    words = "copy of the state: steps 3 to 5 do not change it"
    axes.text(left + 2.0 * unit, 3.08, words, ha="left", va="center", fontsize=10)
    show.save_svg(
        figure,
        HERE / "checkpoint_async.svg",
        "Two timelines. In a synchronous save training waits until everything is written. In a "
        "save in the background training waits only while the state is copied in memory; a thread "
        "then writes the copy while the next steps run.",
    )


def main() -> None:
    draw_shards()
    draw_rename()
    draw_async()


if __name__ == "__main__":
    main()
