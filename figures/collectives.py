"""Draw the pictures of the lesson `collectives` (python figures/collectives.py)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.patches import FancyBboxPatch, Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import (
    Cell,
    draw_arrow,
    draw_box,
    draw_cell,
    draw_grid,
    draw_rank_names,
    draw_title,
    make_canvas,
    pick_text_color,
)

HERE = Path(__file__).parent
INK = show.INK
RANKS = 4


def draw_groups() -> None:
    figure, axes = make_canvas(4.8, 3.35)
    for node in range(2):
        left = 0.1 + node * 2.4
        axes.add_patch(
            FancyBboxPatch(
                (left, 0.42), 2.2, 1.62, "round,pad=0,rounding_size=0.1", fc="none", ec=INK
            )
        )
        draw_title(axes, left + 1.1, 0.2, f"node {node}")
        for local in range(2):
            rank = 2 * node + local
            x = left + 0.12 + local * 1.02
            color = show.RANK_COLORS[rank]
            axes.add_patch(
                FancyBboxPatch(
                    (x, 0.55), 0.94, 1.36, "round,pad=0,rounding_size=0.06", fc=color, lw=0
                )
            )
            for i, (text, weight) in enumerate(
                [
                    ("process", "normal"),
                    (f"rank {rank}", "bold"),
                    (f"local {local}", "normal"),
                    (f"GPU {local}", "normal"),
                ]
            ):
                axes.text(
                    x + 0.47, 0.76 + i * 0.31, text, ha="center", va="center", weight=weight,
                    color=pick_text_color(color),
                )  # fmt: skip
    # Draw the group's members from below.
    for number, rank in enumerate((1, 3)):
        x = 0.1 + (rank // 2) * 2.4 + 0.12 + (rank % 2) * 1.02 + 0.47
        axes.plot([x, x], [2.12, 2.42], color=INK, lw=1.4)
        axes.text(x - 0.08, 2.29, f"group rank {number}", ha="right", va="center")
    axes.plot([1.71, 4.11], [2.42, 2.42], color=INK, lw=1.4)
    draw_title(axes, 2.91, 2.62, "a process group: new_group([1, 3])")
    axes.text(2.4, 3.05, "world size 4: the default group holds all four", ha="center", va="center")
    show.save_svg(
        figure,
        HERE / "collectives_groups.svg",
        "Two nodes with two processes each. Ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1. "
        "On each node the local ranks are 0 and 1, and each process has the GPU of its local "
        "rank. A process group of ranks 1 and 3 numbers them 0 and 1.",
    )


def draw_roots() -> None:
    """Draw broadcast and reduce, before and after."""
    figure, axes = make_canvas(4.8, 2.35)
    own: list[list[Cell]] = [[(r,)] for r in range(RANKS)]
    root_only: list[list[Cell]] = [[(0,)], [()], [()], [()]]
    everyone: list[list[Cell]] = [[(0,)]] * RANKS
    total: list[list[Cell]] = [[tuple(range(RANKS))], [()], [()], [()]]
    draw_rank_names(axes, 0.72, 0.7)
    for x, name, before, after in (
        (0.85, "broadcast", root_only, everyone),
        (2.95, "reduce", own, total),
    ):
        draw_title(axes, x + 0.85, 0.15, name)
        axes.text(x + 0.15, 0.48, "before", ha="center", va="center")
        axes.text(x + 1.55, 0.48, "after", ha="center", va="center")
        draw_grid(axes, x, 0.7, before)
        draw_grid(axes, x + 1.4, 0.7, after)
    for rank in range(RANKS):
        y = 0.85 + rank * 0.39
        draw_arrow(axes, (1.22, 0.85), (2.18, y))
        draw_arrow(axes, (3.32, y), (4.28, 0.85))
    show.save_svg(
        figure,
        HERE / "collectives_roots.svg",
        "Broadcast: before, rank 0 alone holds a tensor; after, all four ranks hold it. "
        "Reduce: before, each rank holds a tensor of its own; after, rank 0 holds their sum.",
    )


def draw_halves() -> None:
    """Draw all-reduce as a reduce-scatter and an all-gather."""
    figure, axes = make_canvas(4.95, 2.95)
    size = 0.28
    all_ranks = tuple(range(RANKS))
    start: list[list[Cell]] = [[(r,)] * RANKS for r in range(RANKS)]
    middle: list[list[Cell]] = [
        [all_ranks if c == r else () for c in range(RANKS)] for r in range(RANKS)
    ]
    end: list[list[Cell]] = [[all_ranks] * RANKS] * RANKS
    draw_rank_names(axes, 0.62, 0.62, size)
    lefts = (0.7, 2.25, 3.8)
    texts = ("own pieces", "one sum on each", "all sums on each")
    for left, text, rows in zip(lefts, texts, (start, middle, end), strict=True):
        for c in range(RANKS):
            axes.text(left + (c + 0.5) * size, 0.5, str(c), ha="center", va="center", size=9)
        draw_grid(axes, left, 0.62, rows, size)
        axes.text(left + 2 * size, 2.27, text, ha="center", va="center", size=10)
    axes.text(0.62, 0.5, "piece", ha="right", va="center", size=9)
    for x, name in ((1.82 + 0.215, "reduce-scatter"), (3.37 + 0.215, "all-gather")):
        draw_arrow(axes, (x - 0.17, 1.32), (x + 0.17, 1.32))
        draw_title(axes, x, 0.22, name)
    axes.plot([0.75, 0.75, 4.87, 4.87], [2.47, 2.55, 2.55, 2.47], color=INK, lw=1.2)
    draw_title(axes, 2.81, 2.75, "all-reduce")
    show.save_svg(
        figure,
        HERE / "collectives_halves.svg",
        "Before, each of four ranks holds four pieces of its own. After a reduce-scatter, rank r "
        "holds the sum of piece r and nothing else. After an all-gather, every rank holds the sums "
        "of all pieces. The two together are an all-reduce.",
    )


def draw_exchange_and_barrier() -> None:
    figure, axes = make_canvas(4.8, 4.5)
    draw_rank_names(axes, 0.72, 0.7)
    draw_title(axes, 2.7, 0.15, "all-to-all")
    numbers = [[f"{r}→{c}" for c in range(RANKS)] for r in range(RANKS)]
    arrived = [[f"{c}→{r}" for c in range(RANKS)] for r in range(RANKS)]
    for left, text, rows, labels in (
        (0.85, "before", [[(r,)] * RANKS for r in range(RANKS)], numbers),
        (3.0, "after", [[(c,) for c in range(RANKS)] for _ in range(RANKS)], arrived),
    ):
        axes.text(left + 0.84, 0.48, text, ha="center", va="center")
        for r in range(RANKS):
            for c in range(RANKS):
                x, y = left + c * 0.42, 0.7 + r * 0.39
                color = show.RANK_COLORS[rows[r][c][0]]
                axes.add_patch(Rectangle((x, y), 0.42, 0.3, fc=color, ec=INK, lw=0.8))
                style = {"ha": "center", "va": "center", "size": 9, "color": pick_text_color(color)}
                axes.text(x + 0.21, y + 0.15, labels[r][c], **style)
    draw_arrow(axes, (2.6, 1.44), (2.93, 1.44))
    draw_title(axes, 2.7, 2.62, "barrier")
    draw_rank_names(axes, 0.72, 2.85)
    arrivals = (1.6, 3.3, 1.2, 2.3)
    for rank, x in enumerate(arrivals):
        y = 2.85 + rank * 0.39
        color = show.RANK_COLORS[rank]
        axes.add_patch(Rectangle((0.85, y), x - 0.85, 0.3, fc=color, ec=INK, lw=0.8))
        if x < 3.3:
            style = {"fill": False, "ec": INK, "ls": (0, (2, 2)), "lw": 0.8}
            axes.add_patch(Rectangle((x, y), 3.3 - x, 0.3, **style))
            axes.text((x + 3.3) / 2, y + 0.15, "waits", ha="center", va="center", size=10)
        axes.add_patch(Rectangle((3.3, y), 1.38, 0.3, fc=color, ec=INK, lw=0.8))
    axes.plot([3.3, 3.3], [2.76, 4.4], color=INK, lw=2.2)
    axes.text(3.36, 4.43, "time →", ha="left", va="center", size=10)
    show.save_svg(
        figure,
        HERE / "collectives_exchange.svg",
        "All-to-all: before, rank i holds four pieces, one for each rank; after, rank j holds the "
        "pieces that all ranks had for it, as if rows became columns. Barrier: ranks arrive at "
        "different times, and all go on when the last one, rank 1, has arrived.",
    )


def draw_tree() -> None:
    """Draw the binomial tree's rounds for eight ranks."""
    figure, axes = make_canvas(4.8, 2.75)
    left, step, size = 0.98, 0.48, 0.34
    has = {0}
    for row in range(4):
        y = 0.42 + row * 0.62
        text = "start" if row == 0 else f"round {row}"
        axes.text(left - 0.12, y + size / 2, text, ha="right", va="center")
        for rank in range(8):
            draw_cell(axes, left + rank * step, y, size, (0,) if rank in has else ())
        if row < 3:
            for rank in sorted(has):
                reach = 2**row
                x = left + rank * step + size / 2
                draw_arrow(axes, (x, y + size), (x + reach * step, y + 0.62), lw=1.2)
            has |= {rank + 2**row for rank in has}
    for rank in range(8):
        axes.text(left + rank * step + size / 2, 0.22, str(rank), ha="center", va="center")
    axes.text(left - 0.12, 0.22, "rank", ha="right", va="center")
    show.save_svg(
        figure,
        HERE / "collectives_tree.svg",
        "Broadcast to eight ranks in three rounds. Round 1: rank 0 sends to rank 1. Round 2: ranks "
        "0 and 1 send to ranks 2 and 3. Round 3: ranks 0 to 3 send to ranks 4 to 7.",
    )


def draw_mistakes() -> None:
    figure, axes = make_canvas(4.4, 3.55)
    panels = {  # label -> each rank's first and second call; []: the rank calls nothing
        "different order": [["all-reduce"], ["broadcast"], ["all-reduce"], ["all-reduce"]],
        "one rank missing": [["all-reduce"], ["all-reduce"], [], ["all-reduce"]],
        "different shapes": [["size 4"], ["size 4"], ["size 3"], ["size 4"]],
        "no error": [["sum a", "sum b"], ["sum b", "sum a"]],
    }
    for number, (head, rows) in enumerate(panels.items()):
        left, top = 0.57 + 2.25 * (number % 2), 0.34 + 1.75 * (number // 2)
        draw_title(axes, left, top - 0.2, head, ha="left")
        draw_rank_names(axes, left - 0.07, top, 0.24, 0.06, len(rows))
        after = "waits" if [] in rows else "no match"
        for rank, calls in enumerate(rows):
            y, wide = top + rank * 0.3, 0.86 if len(rows) > 2 else 0.62
            for i, call in enumerate(calls):
                draw_box(axes, left + i * wide, y, wide, 0.24, call, show.RANK_COLORS[rank])
            if calls and len(rows) > 2:
                edge = {"ls": (0, (2, 2)), "ec": INK, "lw": 0.8, "fill": False}
                axes.add_patch(Rectangle((left + wide, y), 0.68, 0.24, **edge))
                axes.text(left + wide + 0.34, y + 0.12, after, ha="center", va="center", size=9.5)
        if len(rows) == 2:
            axes.text(left, top + 0.75, "no rank waits:\nboth sums are a + b", va="center")
    show.save_svg(
        figure,
        HERE / "collectives_mistakes.svg",
        "Four mistakes. Different order: rank 1 begins with a broadcast, the others with an "
        "all-reduce. One rank missing: rank 2 does not call, and the others wait. Different "
        "shapes: rank 2 sums three numbers, the others four. No error: rank 0 sums a, then b, "
        "rank 1 b, then a; no rank waits, and both sums are a + b.",
    )


def main() -> None:
    draw_mistakes()
    draw_groups()
    draw_roots()
    draw_halves()
    draw_exchange_and_barrier()
    draw_tree()


if __name__ == "__main__":
    main()
