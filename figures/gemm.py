"""Draw the pictures of the lesson `gemm` (python figures/gemm.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import (
    Cell,
    draw_arrow,
    draw_grid,
    draw_rank_names,
    draw_stripes,
    draw_title,
    make_canvas,
    pick_text_color,
)

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
N = 4
ALL = tuple(range(N))
EMPTY = {"ls": (0, (2, 2)), "alpha": 0.45}

Holds = Callable[[int, int], Cell]


def draw_sheet(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    cuts: tuple[int, int],
    holds: Holds,
    words: str = "",
) -> None:
    """Draw a matrix of cuts[0] by cuts[1] blocks; holds(row, column) are the ranks in a block."""
    tall, wide = height / cuts[0], width / cuts[1]
    full = True
    for row in range(cuts[0]):
        for column in range(cuts[1]):
            found = holds(row, column)
            full = full and bool(found)
            place = (x + column * wide, y + row * tall)
            draw_stripes(axes, *place, wide, tall, found)
            if found:
                axes.add_patch(Rectangle(place, wide, tall, fill=False, ec=INK, lw=0.6))
    look = {"lw": 1.0} if full or words else {"lw": 0.8, **EMPTY}
    axes.add_patch(Rectangle((x, y), width, height, fill=False, ec=INK, **look))
    if words:
        middle = (x + width / 2, y + height / 2)
        axes.text(*middle, words, ha="center", va="center", fontsize=9)


def show_rows(r: int, _: int) -> Cell:
    return (r,)


def show_columns(_: int, c: int) -> Cell:
    return (c,)


def show_nothing(*_: int) -> Cell:
    return ()


def draw_ways() -> None:
    figure, axes = make_canvas(6.7, 5.2)
    M, K, width = 1.0, 0.72, 1.15
    whole = "all of it,\non every rank"
    panels = (
        ("by rows", (N, 1), show_rows, (1, 1), show_nothing, (N, 1), show_rows),
        ("by columns", (1, 1), show_nothing, (1, N), show_columns, (1, N), show_columns),
        ("by the inner dimension", (1, N), show_columns, (N, 1), show_rows, None, None),
    )
    notes = (
        "before: B to all\n(broadcast)\nafter: nothing, or\nC to all (all-gather)",
        "before: A to all\n(broadcast)\nafter: nothing, or\nC to all (all-gather)",
        "before: nothing\nafter: four matrices\nto be summed\n(all-reduce, or\nreduce-scatter)",
    )
    for x, words in ((0.66, "A_MK"), (1.91, "B_KN"), (3.41, "C_MN")):
        axes.text(x, 0.2, words, ha="center", va="center", family="monospace")
    for number, (name, a_cuts, a, b_cuts, b, c_cuts, c) in enumerate(panels):
        y = 0.92 + number * 1.52
        draw_title(axes, 0.08, y - 0.3, name, ha="left")
        left = 0.3
        draw_sheet(
            axes,
            left,
            y,
            K,
            M,
            a_cuts,
            a,
            "all of it,\non every\nrank" if a is show_nothing else "",
        )
        left += K + 0.32
        axes.text(left - 0.16, y + M / 2, "@", ha="center", va="center", fontsize=12)
        draw_sheet(
            axes, left, y + (M - K) / 2, width, K, b_cuts, b, whole if b is show_nothing else ""
        )
        left += width + 0.34
        axes.text(left - 0.17, y + M / 2, "=", ha="center", va="center", fontsize=13)
        if c is not None:
            draw_sheet(axes, left, y, width, M, c_cuts, c)
        else:
            for rank in ALL:
                at = (left + 0.13 * rank, y + 0.07 * rank - 0.1)
                color = COLORS[rank]
                axes.add_patch(Rectangle(at, width, M, fc=color, ec=INK, lw=1.0))
        axes.text(4.85, y + M / 2, notes[number], va="center", fontsize=10)
    show.save_svg(
        figure,
        HERE / "gemm_ways.svg",
        "Three ways to share C = A @ B among four ranks. By rows: each rank has a quarter of A's "
        "rows and all of B, and makes a quarter of C's rows. By columns: each has all of A and a "
        "quarter of B's columns, and makes a quarter of C's columns. By the inner dimension: each "
        "has a quarter of A's columns and of B's rows, and makes a matrix as large as C; these "
        "four matrices have to be summed.",
    )


def draw_story() -> None:
    figure, axes = make_canvas(6.7, 2.9)
    high, inner, wide = 0.4, 0.24, 0.38
    step, top = 1.52, 0.72
    heads = (
        "rank 0 reads\nA and B",
        "B is broadcast,\nA sent by rows",
        "each multiplies",
        "all-gather of C",
    )

    def show_own(rank: int) -> Holds:
        return lambda r, _: (r,) if r == rank else ()

    for column, head in enumerate(heads):
        x = 0.78 + column * step
        axes.text(x + 0.55, 0.26, head, ha="center", va="center", fontsize=10)
        for rank in ALL:
            y = top + rank * 0.52
            if column == 0:
                a = (lambda r, _: (r,)) if rank == 0 else show_nothing
            else:
                a = show_own(rank)
            has_b = rank == 0 or column > 0
            c = {2: show_own(rank), 3: show_rows}.get(column, show_nothing)
            draw_sheet(axes, x, y, inner, high, (N, 1), a)
            b_look = {"fc": "#9a9a9a"} if has_b else {"fill": False}
            place = (x + inner + 0.07, y + (high - inner) / 2)
            edge = {} if has_b else EMPTY
            axes.add_patch(Rectangle(place, wide, inner, ec=INK, lw=0.8, **b_look, **edge))
            draw_sheet(axes, x + inner + wide + 0.14, y, wide, high, (N, 1), c)
            if column == 0:
                axes.text(x - 0.12, y + high / 2, f"rank {rank}", ha="right", va="center")
        for offset, letter in (
            (inner / 2, "A"),
            (inner + 0.07 + wide / 2, "B"),
            (inner + 0.14 + wide * 1.5, "C"),
        ):
            axes.text(x + offset, top - 0.09, letter, ha="center", va="center", fontsize=9)
        if column:
            y = top + 2 * 0.52 - 0.06
            draw_arrow(axes, (x - 0.36, y), (x - 0.06, y))
    show.save_svg(
        figure,
        HERE / "gemm_story.svg",
        "A product by rows on four ranks, step by step. At first rank 0 alone holds A and B. Then "
        "B is broadcast to all, and each rank gets its quarter of the rows of A. Each multiplies, "
        "and holds a quarter of the rows of C. After an all-gather every rank holds all of C.",
    )


def draw_inner() -> None:
    figure, axes = make_canvas(6.5, 2.75)
    size = 0.3
    y = 0.72
    draw_rank_names(axes, 0.62, y)
    wide = N * size
    own: list[list[Cell]] = [[(rank,)] * N for rank in ALL]
    summed: list[list[Cell]] = [[ALL if c == r else () for c in ALL] for r in ALL]
    places = (0.7, 0.7 + wide + 0.95, 0.7 + 2 * (wide + 0.95))
    for place, held in zip(places, (own, summed, [[ALL] * N] * N), strict=True):
        draw_grid(axes, place, y, held)
    heads = ("a partial sum\nof all of C", "the sum,\na quarter of C", "the sum,\nall of C")
    for place, words in zip(places, heads, strict=True):
        axes.text(place + wide / 2, 0.36, words, ha="center", va="center", fontsize=10)
    middle = y + 2 * 0.39 - 0.045
    for place, words in zip(places[:2], ("reduce-\nscatter", "all-\ngather"), strict=True):
        draw_arrow(axes, (place + wide + 0.12, middle), (place + wide + 0.83, middle))
        where = (place + wide + 0.475, middle - 0.27)
        axes.text(*where, words, ha="center", va="center", fontsize=10)
    left, right = places[0] + 0.05, places[2] + wide - 0.05
    axes.plot([left, left, right, right], [2.32, 2.4, 2.4, 2.32], color=INK, lw=1.2)
    draw_title(axes, (left + right) / 2, 2.6, "all-reduce")
    show.save_svg(
        figure,
        HERE / "gemm_inner.svg",
        "After a product by the inner dimension each of four ranks holds a partial sum of C, as "
        "large as C. A reduce-scatter leaves each rank a quarter of C, summed over all ranks. An "
        "all-gather then gives every rank all of C. The two are an all-reduce.",
    )


def draw_summa() -> None:
    figure, axes = make_canvas(6.7, 4.35)
    side = 1.05

    def get_owner(r: int, c: int) -> Cell:
        return (2 * r + c,)

    # Left: the grid. Right: two steps. Each broadcasts a column of A's blocks along the rows of
    # the grid, and a row of B's blocks along its columns.
    for y, step in ((0.62, 0), (2.75, 1)):
        draw_title(axes, 0.05, y - 0.38, f"step {step + 1}", ha="left")
        for x, letter in ((0.35, "A"), (1.9, "B")):
            axes.text(x + side / 2, y - 0.14, letter, ha="center", va="center")
            draw_sheet(axes, x, y, side, side, (2, 2), get_owner)
            for other in range(2):
                color = INK
                if letter == "A":
                    start = (x + (step + 0.5) * side / 2, y + (other + 0.5) * side / 2)
                    end = (x + (1.5 - step) * side / 2, start[1])
                else:
                    start = (x + (other + 0.5) * side / 2, y + (step + 0.5) * side / 2)
                    end = (start[0], y + (1.5 - step) * side / 2)
                axes.plot(*start, "o", color=color, ms=4)
                draw_arrow(axes, start, end, color=color)
        for r in range(2):
            for c in range(2):
                rank = 2 * r + c
                x, top = 3.55 + c * 1.6, y - 0.2 + r * 0.78
                tile = 0.3
                axes.add_patch(Rectangle((x, top), 1.48, 0.66, fc="none", ec=COLORS[rank], lw=2.5))
                axes.text(x + 0.08, top + 0.14, f"rank {rank}", va="center", fontsize=9)
                low = top + 0.28
                holders = (2 * r + step, 2 * step + c)
                for i, (holder, sign) in enumerate(zip(holders, ("A", "B"), strict=True)):
                    left = x + 0.62 + i * 0.46
                    axes.add_patch(
                        Rectangle((left, low), tile, tile, fc=COLORS[holder], ec=INK, lw=0.8)
                    )
                    ink = pick_text_color(COLORS[holder])
                    middle = (left + tile / 2, low + tile / 2)
                    axes.text(*middle, sign, ha="center", va="center", color=ink, fontsize=10)
                axes.text(x + 0.1, low + tile / 2, "C +=", va="center", fontsize=10)
                axes.text(x + 1.0, low + tile / 2, "@", ha="center", va="center", fontsize=9)
    show.save_svg(
        figure,
        HERE / "gemm_summa.svg",
        "SUMMA on a grid of two by two ranks; each rank holds one block of A, of B and of C. Step "
        "1: ranks 0 and 2 broadcast their block of A along their row of the grid, ranks 0 and 1 "
        "their block of B along their column; every rank adds the product of these two blocks to "
        "its block of C. Step 2: the same with the blocks of A of ranks 1 and 3, and the blocks "
        "of B of ranks 2 and 3.",
    )


def draw_thin() -> None:
    """Draw a rank's bytes for its share of C, sharded by columns, for growing numbers of ranks."""
    figure, axes = make_canvas(6.75, 2.1)
    tall, y = 0.65, 0.66
    left = 0.12
    for t in (1, 2, 4, 16):
        thin = tall / t
        wide = tall + thin + thin + 0.2
        draw_title(axes, left, 0.2, f"{t} rank" + "s" * (t > 1), ha="left")
        axes.add_patch(Rectangle((left, y), tall, tall, fc="none", ec=INK, lw=1))
        axes.text(left + tall / 2, y + tall / 2, "A", ha="center", va="center")
        for number, letter in ((0, "B"), (1, "C")):
            x = left + tall + 0.1 + number * (thin + 0.1)
            axes.add_patch(Rectangle((x, y), thin, tall, fc=COLORS[0], ec=INK, lw=1))
            middle = (x + thin / 2, y - 0.11)
            axes.text(*middle, letter, ha="center", va="center", fontsize=9)
        words = f"work 1/{t}" if t > 1 else "work 1"
        # One rank reads and writes three equal squares, A, B and C; with more ranks B and C shrink.
        moved = f"bytes {(1 + 2 / t) / 3:.2f}" if t > 1 else "bytes 1"
        axes.text(left, y + tall + 0.25, words, va="center", fontsize=10)
        axes.text(left, y + tall + 0.47, moved, va="center", fontsize=10)
        left += wide + 0.27
    show.save_svg(
        figure,
        HERE / "gemm_thin.svg",
        "What one rank reads and writes for its share of a square product, sharded by columns. On "
        "1 rank: all of A, B and C. On 2: all of A, half of B and C; half the work for 0.67 of "
        "the bytes. On 4: a quarter of the work for 0.50 of the bytes. On 16: a sixteenth of the "
        "work for 0.38 of the bytes.",
    )


def main() -> None:
    draw_ways()
    draw_story()
    draw_inner()
    draw_summa()
    draw_thin()


if __name__ == "__main__":
    main()
