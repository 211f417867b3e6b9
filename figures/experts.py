"""Draw the pictures of the lesson `experts` (python figures/experts.py).

A token has the colour of the rank that it belongs to, wherever it travels; its number is that of
the expert that it goes to. The docstring of a function that draws is the picture's alternative
text.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import (
    draw_arrow,
    draw_cell,
    draw_rank_names,
    draw_text,
    draw_title,
    make_canvas,
)

HERE = Path(__file__).parent
INK = show.INK
SMALL = 9  # points; other text has 10 or 11
SIZE = 0.23  # width of a token
Token = tuple[int, int]  # its rank, the expert that it goes to

CHOSEN = [[2, 0, 2, 1], [2, 3, 0, 2]]  # expert of each rank's four tokens


def draw_column(axes: Axes, x: float, y: float, tokens: list[Token]) -> None:
    """Draw tokens one below the other."""
    for number, (rank, expert) in enumerate(tokens):
        draw_cell(axes, x, y + number * SIZE, SIZE, (rank,), str(expert))


def draw_frame(axes: Axes, x: float, y: float, rows: int, text: str) -> None:
    """Draw an expert's network as a frame around its rows."""
    axes.add_patch(
        Rectangle((x - 0.05, y - 0.04), SIZE + 0.1, rows * SIZE + 0.08, fill=False, ec=INK, lw=1.2)
    )
    draw_text(axes, x + SIZE + 0.1, y + rows * SIZE / 2, text, ha="left", fontsize=SMALL)


def draw_exchange(axes: Axes, x: float, top: float, bottom: float) -> None:
    """Draw an all-to-all as a box across the ranks."""
    axes.add_patch(Rectangle((x, top), 0.24, bottom - top, fill=False, ec=INK, lw=1.4))
    draw_text(axes, x + 0.12, (top + bottom) / 2, "all-to-all", rotation=90)


def layer() -> Figure:
    """A layer of four experts on two ranks with four tokens each. Rank 0's tokens choose experts
    2, 0, 2 and 1, rank 1's choose 2, 3, 0 and 2. Each rank sorts its tokens by expert. An
    all-to-all brings rank 0, which has experts 0 and 1, three rows, and rank 1, which has experts
    2 and 3, five. Each expert computes its rows; a second all-to-all brings them back, and each
    rank puts them into the order of its tokens.
    """
    figure, axes = make_canvas(4.75, 3.15)
    tops = 0.62, 1.86
    heads = (0.66, "tokens"), (1.27, "sorted"), (2.6, "experts"), (3.79, "back"), (4.4, "in order")
    for x, name in heads:
        draw_title(axes, x, 0.17, name, fontsize=10)
    draw_exchange(axes, 1.58, 0.4, 3.05)
    draw_exchange(axes, 3.36, 0.4, 3.05)
    tokens = [[(rank, expert) for expert in CHOSEN[rank]] for rank in range(2)]
    ordered = [sorted(mine, key=lambda token: token[1]) for mine in tokens]
    for rank, top in enumerate(tops):
        draw_text(axes, 0.48, top + 2 * SIZE, f"rank {rank}", ha="right")
        draw_column(axes, 0.55, top, tokens[rank])
        draw_column(axes, 1.15, top, ordered[rank])
        draw_column(axes, 3.71, top, ordered[rank])
        draw_column(axes, 4.31, top, tokens[rank])
        for start, end in ((0.81, 1.12), (1.41, 1.56), (3.62, 3.7), (3.97, 4.28)):
            if end - start > 0.1:
                draw_arrow(
                    axes, (start, top + 2 * SIZE), (end, top + 2 * SIZE), lw=1, mutation_scale=8
                )
    for rank in range(2):
        y = (0.55, 1.62)[rank]
        for expert in (2 * rank, 2 * rank + 1):
            rows = [token for mine in ordered for token in mine if token[1] == expert]
            draw_column(axes, 2.32, y, rows)
            draw_frame(axes, 2.32, y, len(rows), f"expert {expert}")
            y += len(rows) * SIZE + 0.16
    for rank, (top, high) in enumerate(((0.5, 3), (1.57, 5))):
        middle = top + (high * SIZE + 0.3) / 2
        draw_text(axes, 2.16, middle, f"rank {rank}", rotation=90, fontsize=SMALL)
        draw_arrow(axes, (1.84, middle), (2.06, middle), lw=1, mutation_scale=8)
        draw_arrow(axes, (3.2, middle), (3.34, middle), lw=1, mutation_scale=8)
    return figure


def capacity() -> Figure:
    """Six tokens of a sequence, each with a first and a second choice, and three experts with four
    places each. First choices come first: expert 0 is the first choice of tokens 0, 1, 3, 4 and 5,
    so token 5 gets no place there, and neither does token 2 with its second choice. Expert 1 gets
    tokens 2, 0, 3 and 5, expert 2 tokens 1 and 4. Two of twelve choices are dropped.
    """
    first, second = [0, 0, 1, 0, 0, 0], [1, 2, 0, 1, 2, 1]
    figure, axes = make_canvas(4.7, 2.0)
    draw_title(axes, 0.95, 0.17, "choices", fontsize=10)
    for token in range(6):
        draw_text(axes, 0.62 + token * 0.3, 0.45, str(token), fontsize=SMALL)
    draw_text(axes, 0.42, 0.45, "token", ha="right", fontsize=SMALL)
    for name, row, y in (("first", first, 0.58), ("second", second, 0.92)):
        draw_text(axes, 0.42, y + 0.13, name, ha="right", fontsize=SMALL)
        for token, expert in enumerate(row):
            draw_cell(axes, 0.5 + token * 0.3, y, 0.26, (expert + 4,), str(expert))
    queues = {
        expert: [t for row in (first, second) for t in range(6) if row[t] == expert]
        for expert in range(3)
    }
    draw_title(axes, 3.46, 0.17, "four places each", fontsize=10)
    for expert, queue in queues.items():
        y = 0.42 + expert * 0.42
        draw_text(axes, 2.86, y + 0.13, str(expert), ha="right")
        for place in range(max(4, len(queue))):
            kept, label = place < 4, str(queue[place]) if place < len(queue) else ""
            holds = (expert + 4,) if kept and label else ()
            draw_cell(axes, 2.95 + place * 0.26 + (0 if kept else 0.12), y, 0.26, holds, label)
    draw_text(axes, 1.38, 1.4, "numbers: experts", fontsize=SMALL)
    draw_text(axes, 3.46, 1.8, "numbers: tokens", fontsize=SMALL)
    draw_text(axes, 4.36, 0.3, "dropped", fontsize=SMALL)
    return figure


def gradients() -> Figure:
    """Four ranks with tokens of their own; ranks 0 and 1 together have all experts, and so have
    ranks 2 and 3. After backward, gradients of shared parameters cover their rank's own tokens; an
    expert's gradient covers the tokens of both ranks of its pair, which came through the
    all-to-all. After averaging, shared parameters' gradients are averaged over four ranks; those of
    experts 0 and 1 are summed over ranks 0 and 2, those of experts 2 and 3 over ranks 1 and 3, and
    divided by four: every gradient covers all four ranks' tokens.
    """
    figure, axes = make_canvas(4.66, 2.5)
    size, gap = 0.32, 0.12
    top = 0.68
    for x, name in ((1.35, "after backward"), (3.55, "after averaging")):
        draw_title(axes, x, 0.17, name, fontsize=10)
    draw_rank_names(axes, 0.62, top, size, gap)
    for left, whole, part in (
        (0.72, lambda r: (r,), lambda r: (r // 2 * 2, r // 2 * 2 + 1)),
        (2.92, lambda r: (0, 1, 2, 3), lambda r: (0, 1, 2, 3)),
    ):
        draw_text(axes, left + 0.16, 0.48, "shared", fontsize=SMALL)
        draw_text(axes, left + 0.95, 0.48, "experts", fontsize=SMALL)
        for rank in range(4):
            y = top + rank * (size + gap)
            draw_cell(axes, left, y, size, whole(rank))
            draw_cell(axes, left + 0.63, y, size, part(rank))
            which = "0, 1" if rank % 2 == 0 else "2, 3"
            draw_text(axes, left + 1.02, y + size / 2, which, ha="left", fontsize=SMALL)
    middle = top + 2 * (size + gap) - gap / 2
    draw_arrow(axes, (2.35, middle), (2.8, middle))
    return figure


def padded() -> Figure:
    """Rows for four experts: 5, 2, 1 and 4. With uneven messages, 12 rows are sent. Padded to the
    fullest expert, 20 are sent, 8 of them empty.
    """
    rows = 5, 2, 1, 4
    figure, axes = make_canvas(4.4, 2.0)
    for left, name, fill in ((0.35, "uneven: 12 rows", False), (2.6, "padded: 20 rows", True)):
        draw_title(axes, left + 0.75, 0.17, name, fontsize=10)
        for expert, high in enumerate(rows):
            x = left + expert * 0.42
            for row in range(max(rows) if fill else high):
                holds = (expert + 4,) if row < high else ()
                draw_cell(axes, x, 1.45 - row * 0.24, 0.24, holds)
            draw_text(axes, x + 0.12, 1.82, str(expert), fontsize=SMALL)
    draw_text(axes, 2.2, 1.82, "experts", fontsize=SMALL)
    return figure


if __name__ == "__main__":
    for draw in (layer, capacity, gradients, padded):
        words_of = " ".join((draw.__doc__ or "").split())
        show.save_svg(draw(), HERE / f"experts_{draw.__name__}.svg", words_of)
