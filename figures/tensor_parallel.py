"""Draw the pictures of the lesson `tensor_parallel` (python figures/tensor_parallel.py).

Tensors that are the same on every rank are pale; a rank's shard or partial sum has that rank's
colour; a sum has a stripe of each rank's colour. The docstring of a function that draws is the
picture's alternative text.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import (
    draw_arrow,
    draw_stripes,
    draw_text,
    draw_title,
    make_canvas,
    pick_text_color,
)

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
SMALL = 9  # points; other text has 10 or 11
SAME = None  # in place of ranks: the same on every rank
Corner = tuple[float, float, float, float]  # left, top, width, height: inches


def draw_piece(axes: Axes, place: Corner, ranks: tuple[int, ...] | None, text: str = "") -> None:
    """Draw a tensor computed by `ranks`, the sum if they are several; (): not on this rank."""
    left, top, wide, high = place
    if ranks is SAME:
        axes.add_patch(Rectangle((left, top), wide, high, fc=INK, alpha=0.13, lw=0))
    else:
        draw_stripes(axes, left, top, wide, high, ranks)
    look = {"ls": (0, (2, 2)), "lw": 0.7, "alpha": 0.5} if ranks == () else {"lw": 0.8}
    axes.add_patch(Rectangle((left, top), wide, high, fill=False, ec=INK, **look))
    color = pick_text_color(COLORS[ranks[0]]) if ranks and len(ranks) == 1 else INK
    draw_text(axes, left + wide / 2, top + high / 2, text, color=color)


def draw_matrix(axes: Axes, place: Corner, by: str, holders: tuple[int, ...] = (0, 1)) -> None:
    """Draw a matrix sharded by "columns" or "rows"; only the halves of `holders` are filled."""
    left, top, wide, high = place
    for half in range(2):
        corner = (left + half * wide / 2, top, wide / 2, high)
        if by == "rows":
            corner = (left, top + half * high / 2, wide, high / 2)
        draw_piece(axes, corner, (half,) if half in holders else ())


def draw_exchange(axes: Axes, place: Corner, text: str, **look: object) -> None:
    """Draw a collective, or an operator that may be one, as a box across the ranks."""
    left, top, wide, high = place
    axes.add_patch(Rectangle((left, top), wide, high, fill=False, ec=INK, lw=1.4))
    look = {"rotation": 90 if high > wide else 0, **look}
    draw_text(axes, left + wide / 2, top + high / 2, text, **look)


def ffn() -> Figure:
    """A feed-forward network on two ranks. Each rank has all of X. The first matrix is sharded by
    columns: each rank has 4096 x 8192 of it, and computes its half of XW₁ and of its GELU. The
    second is sharded by rows: each rank has 8192 x 4096 of it, and computes a partial sum of Y, as
    large as all of Y. An all-reduce adds the two, and each rank has all of Y.
    """
    h, wide = 0.27, 0.8
    figure, axes = make_canvas(4.66, 2.9)
    x = {"X": 0.56, "W₁": 0.93, "GELU(XW₁)": 1.95, "W₂": 2.88, "Y": 4.26}
    for name, left in x.items():
        draw_title(axes, left + (wide if "W₁" in name else h) / 2, 0.15, name, fontsize=10)
    for rank in range(2):
        y = 0.38 + rank * (wide + 0.3)
        middle = y + wide / 2
        draw_text(axes, 0.5, middle, f"rank {rank}", ha="right")
        draw_piece(axes, (x["X"], middle - h / 2, h, h), SAME)
        draw_matrix(axes, (x["W₁"], middle - h / 2, wide, h), "columns", (rank,))
        draw_matrix(axes, (x["GELU(XW₁)"], middle - h / 2, wide, h), "columns", (rank,))
        draw_matrix(axes, (x["W₂"], y, h, wide), "rows", (rank,))
        draw_piece(axes, (3.36, middle - h / 2, h, h), (rank,))
        draw_text(axes, 3.5, middle - h / 2 - 0.18, "partial\nsum", fontsize=SMALL)
        draw_piece(axes, (x["Y"], middle - h / 2, h, h), (0, 1))
        draw_text(axes, x["Y"] + h / 2, middle - h / 2 - 0.12, "the sum", fontsize=SMALL)
        for at, sign in ((0.88, "·"), (1.84, "→"), (2.815, "·"), (3.25, "→")):
            draw_text(axes, at, middle, sign, fontsize=12)
        draw_arrow(axes, (3.63, middle), (3.86, middle), lw=1.1, mutation_scale=9)
        draw_arrow(axes, (4.1, middle), (4.26, middle), lw=1.1, mutation_scale=9)
    draw_exchange(axes, (3.86, 0.38, 0.24, 2 * wide + 0.3), "all-reduce")
    for at, size in ((1.33, "4096 × 8192"), (3.01, "8192 × 4096")):
        draw_text(axes, at, 2.45, size, fontsize=SMALL)
        draw_text(axes, at, 2.62, "33.6 M each", fontsize=SMALL)
    return figure


def orders() -> Figure:
    """Four ways of sharding two matrices, and what each rank sends, in units of one Y times
    (N-1)/N. Columns, then rows: nothing before GELU, an all-reduce of Y at the end: 2. Columns
    twice: an all-gather after GELU and one of Y: 4 + 1. Rows twice: a reduce-scatter before GELU
    and an all-reduce of Y: 4 + 2. Rows, then columns: an all-reduce before GELU and an all-gather
    of Y: 8 + 1.
    """
    h, wide, step = 0.2, 0.8, 1.06
    figure, axes = make_canvas(6.5, 4 * step + 0.4)
    heads = {"X": 0.2, "W₁": 0.96, "GELU(XW₁)": 2.82, "W₂": 3.82, "Y": 5.2, "sends": 6.05}
    for name, at in heads.items():
        draw_title(axes, at, 0.14, name, fontsize=10)
    rows = (
        ("columns, rows", "nothing", "all-reduce", "2"),
        ("columns twice", "all-gather", "all-gather", "4 + 1"),
        ("rows twice", "reduce-scatter", "all-reduce", "4 + 2"),
        ("rows, columns", "all-reduce", "all-gather", "8 + 1"),
    )
    for number, (name, between, after, sent) in enumerate(rows):
        y = 0.46 + number * step
        middle = y + wide / 2
        top = middle - h / 2
        first, second = (name.startswith("rows"), after == "all-reduce")  # sharded by rows?
        for place, by_rows in (((0.1, top, h, h), first), ((2.42, top, wide, h), second)):
            if by_rows:  # the left factor of a matrix sharded by rows is sharded by columns
                draw_matrix(axes, place, "columns")
            else:
                draw_piece(axes, place, SAME)
        draw_matrix(axes, (0.56, top, wide, h), "rows" if first else "columns")
        draw_matrix(axes, (3.72, y, h, wide), "rows" if second else "columns")
        draw_piece(axes, (5.1, top, h, h), SAME)
        for left, right, does in ((1.42, 2.36, between), (3.98, 5.04, after)):
            draw_arrow(axes, (left, middle), (right, middle), lw=1.1)
            draw_text(axes, (left + right) / 2, middle - 0.13, does, fontsize=SMALL)
        for at in (0.43, 3.47):
            draw_text(axes, at, middle, "·", fontsize=13)
        draw_text(axes, 6.05, middle, sent, fontsize=12, weight="bold")
        draw_text(axes, 0.96, middle - 0.3, name, fontsize=SMALL, style="italic")
    return figure


def conjugate() -> Figure:
    """The two operators around a sharded part of a network, on two ranks. Forward, copy_to gives
    each rank the same x, and reduce_from adds up what the two computed. Backward, reduce_from gives
    each rank the same gradient, and copy_to adds up the gradients of x.
    """
    figure, axes = make_canvas(6.3, 3.5)
    size, gap, left = 0.34, 0.2, 1.3
    x, end = {"copy_to": left + 0.6, "part": left + 1.72, "reduce_from": left + 3.2}, left + 4.35
    for backward in range(2):
        y = 0.34 + backward * 1.72
        draw_title(axes, 0.05, y + size + gap / 2, "backward" if backward else "forward", ha="left")
        for rank in range(2):
            top = y + rank * (size + gap)
            middle = top + size / 2
            draw_piece(axes, (left, top, size, size), (0, 1) if backward else SAME)
            draw_piece(axes, (end, top, size, size), SAME if backward else (0, 1))
            draw_text(axes, left - 0.16, middle, "∂x" if backward else "x")
            draw_text(axes, end + size + 0.16, middle, "∂y" if backward else "y")
            draw_piece(axes, (x["part"], top, 0.86, size), (rank,), "its part")
            stops = [left + size, x["copy_to"], x["copy_to"] + 0.42, x["part"]]
            stops += [x["part"] + 0.86, x["reduce_from"], x["reduce_from"] + 0.42, end]
            for begin, stop in zip(stops[::2], stops[1::2], strict=True):
                ends = ((begin + 0.05, middle), (stop - 0.05, middle))
                draw_arrow(axes, *(ends[::-1] if backward else ends), lw=1.1)
        for name in ("copy_to", "reduce_from"):
            sums = (name == "copy_to") == bool(backward)
            draw_exchange(axes, (x[name], y, 0.42, 2 * size + gap), "")
            draw_text(axes, x[name] + 0.21, y + size + gap / 2, "+" if sums else "=", fontsize=15)
            draw_text(axes, x[name] + 0.21, y - 0.15, name, weight="bold")
            does = "all-reduce" if sums else "nothing"
            draw_text(axes, x[name] + 0.21, y + 2 * size + gap + 0.15, does, fontsize=SMALL)
    return figure


def heads() -> Figure:
    """Attention with eight query heads and four key-value heads on two ranks. Rank 0 has the first
    four query heads and the two key-value heads that they share, rank 1 the others: columns of the
    three matrices. Each rank computes attention for its own heads, and multiplies by its rows of
    the output matrix; an all-reduce adds the two partial sums.
    """
    figure, axes = make_canvas(6.4, 4.3)
    size, half, left, wide = 0.34, 2.95, 0.72, 2.22
    for rank in range(2):
        x = left + rank * half
        middle = x + wide / 2
        draw_title(axes, middle, 0.14, f"rank {rank}")
        draw_piece(axes, (x, 0.34, wide, 0.3), SAME, "x, all of it")
        for name, top in (("queries", 0.98), ("keys", 1.44), ("values", 1.9)):
            draw_text(axes, x - 0.08, top + size / 2, name if rank == 0 else "", ha="right")
            heads = 4 if name == "queries" else 2
            for i in range(heads):
                place = (x + i * wide / heads + 0.03, top, wide / heads - 0.06, size)
                draw_piece(axes, place, (rank,), str(rank * heads + i))
        draw_piece(axes, (x, 2.6, wide, 0.3), (rank,), "its rows of the output matrix")
        for begin, end in ((0.66, 0.94), (2.28, 2.57), (2.92, 3.16), (3.48, 3.72)):
            draw_arrow(axes, (middle, begin), (middle, end), lw=1.1)
        for y, text in ((0.79, "its columns"), (2.42, "attention"), (3.04, "partial sum")):
            draw_text(axes, middle + 0.1, y, text, ha="left", fontsize=SMALL)
        draw_piece(axes, (x, 3.74, wide, 0.3), (0, 1))
        draw_text(axes, middle, 4.16, "y, the sum")
    draw_exchange(axes, (left, 3.18, half + wide, 0.28), "all-reduce")
    return figure


def vocabulary() -> Figure:
    """The vocabulary on two ranks, four of eight entries each. Left, the embedding: for tokens 5,
    1, 7 and 2 each rank looks up those that it has and puts zeros for the others; an all-reduce
    adds the two. Right, the loss: each rank keeps its half of the logits, and three numbers for
    each token are reduced: the largest logit, the sum of the exponentials, and the target's logit,
    which one rank has.
    """
    figure, axes = make_canvas(6.75, 3.35)
    tall, tokens, targets = 0.27, (5, 1, 7, 2), (1, 7, 2, 6)
    x = {"table": 0.62, "rows": 1.28, "sum": 1.78, "all": 2.22}
    x |= {"numbers": 4.36, "reduce": 5.22, "result": 5.68}
    draw_title(axes, 0.62, 0.14, "embedding", ha="left")
    draw_title(axes, 3.0, 0.14, "loss", ha="left")
    for rank in range(2):
        y = 0.68 + rank * 1.38
        axes.text(0.52, y + 2 * tall, f"rank {rank}", ha="right", va="center")
        for entry in range(8):
            mine = (rank,) if entry // 4 == rank else ()
            draw_piece(axes, (x["table"], y + entry * tall / 2, 0.34, tall / 2), mine)
            for token in range(4):
                draw_piece(axes, (3.0 + entry * 0.14, y + token * tall, 0.14, tall), mine)
        for row, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            top = y + row * tall
            mine = (rank,) if token // 4 == rank else ()
            draw_piece(axes, (x["rows"], top, 0.34, tall), mine, str(token if mine else 0))
            draw_piece(axes, (x["all"], top, 0.34, tall), (token // 4,), str(token))
            mine = (rank,) if target // 4 == rank else ()
            for i, holds in enumerate(((rank,), (rank,), mine)):
                texts = ("", "") if i < 2 else (str(target if mine else 0), str(target))
                draw_piece(axes, (x["numbers"] + i * 0.24, top, 0.24, tall), holds, texts[0])
                both = (0, 1) if i < 2 else (target // 4,)
                draw_piece(axes, (x["result"] + i * 0.24, top, 0.24, tall), both, texts[1])
        for begin, end in ((x["table"] + 0.38, x["rows"] - 0.04), (4.16, x["numbers"] - 0.04)):
            draw_arrow(axes, (begin, y + 2 * tall), (end, y + 2 * tall), lw=1.1)
    for name in ("sum", "reduce"):
        draw_exchange(axes, (x[name], 0.68, 0.3, 1.38 + 4 * tall), "all-reduce")
    for at, name in ((0.79, "entries"), (1.45, "rows"), (2.39, "rows"), (3.56, "logits")):
        draw_text(axes, at, 0.5, name, fontsize=SMALL)
    for left in (x["numbers"], x["result"]):
        for i, name in enumerate(("max", "sum", "target")):
            look = {"fontsize": SMALL, "rotation": 50, "ha": "left", "va": "bottom"}
            axes.text(left + i * 0.24 + 0.04, 0.64, name, **look)
    return figure


def block() -> Figure:
    """A block on two ranks. The residual stream, LayerNorms and dropout are whole on both ranks.
    Attention and the feed-forward network are sharded, from copy_to to reduce_from. In forward each
    reduce_from is an all-reduce, in backward each copy_to: two and two.
    """
    figure, axes = make_canvas(6.65, 2.4)
    tall, step, gap = 0.4, 0.6, 0.1
    half = {"norm": 0.46, "copy_to": 0.28, "sharded": 0.88, "reduce_from": 0.28, "drop\nadd": 0.46}
    for rank in range(2):
        y = 0.32 + rank * step
        middle, beyond = y + tall / 2, (y - 0.12, y + tall + 0.12)[rank]
        draw_text(axes, 0.54, middle, f"rank {rank}", fontsize=11, ha="right")
        x = 0.64
        for inner in ("attention", "feed-\nforward"):
            begin = x = x + gap  # of the shortcut, between two boxes
            for name, wide in half.items():
                draw_arrow(axes, (x, middle), (x + gap, middle), lw=0.9, mutation_scale=7)
                x += gap
                if "_" not in name:
                    ranks, label = ((rank,), inner) if name == "sharded" else (SAME, name)
                    draw_piece(axes, (x, y, wide, tall), ranks, label)
                elif rank == 0:
                    draw_exchange(
                        axes, (x, y - 0.04, wide, step + tall + 0.08), name, fontsize=SMALL
                    )
                    for row, sign in enumerate("=+" if name == "copy_to" else "+="):
                        draw_text(axes, x + wide / 2, 1.7 + row * 0.26, sign, fontsize=13)
                x += wide
            end, foot = (x - 0.23, beyond), (x - 0.23, y + rank * tall)
            shortcut = (begin - gap, middle), (begin, middle), (begin, beyond), end
            axes.plot(*zip(*shortcut, strict=True), color=INK, lw=0.9)
            draw_arrow(axes, end, foot, lw=0.9, mutation_scale=7)
    for row, name in enumerate(("forward", "backward")):
        draw_text(axes, 0.9, 1.7 + row * 0.26, name, ha="right")
    for x, text in ((2.5, "=  nothing sent"), (4.3, "+  all-reduce")):
        draw_text(axes, x, 2.28, text, fontsize=SMALL)
    return figure


def main() -> None:
    for draw in (ffn, orders, conjugate, heads, vocabulary, block):
        alt = " ".join(draw.__doc__.split())
        show.save_svg(draw(), HERE / f"tensor_parallel_{draw.__name__}.svg", alt)


if __name__ == "__main__":
    main()
