"""Draw the pictures of the lesson `context_parallel` (python figures/context_parallel.py).

What one rank has or computes has that rank's colour. In pictures of a tensor, tokens run downwards,
heads and columns to the right. The docstring of a function that draws is the picture's alternative
text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from shardlab import context_parallel as cp
from shardlab.common import show
from shardlab.common.shapes import PRESETS
from shardlab.common.show.drawing import (
    draw_arrow,
    draw_text,
    draw_title,
    make_canvas,
    pick_text_color,
)
from shardlab.layout import Layout

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
SMALL = 9  # points; other text has 10 or 11
N = 4
Corner = tuple[float, float, float, float]  # left, top, width, height: inches


def draw_tile(axes: Axes, place: Corner, rank: int, text: str = "", **look: object) -> None:
    """Draw a box in a rank's colour."""
    left, top, wide, high = place
    axes.add_patch(Rectangle((left, top), wide, high, lw=0, fc=COLORS[rank]))
    axes.add_patch(Rectangle((left, top), wide, high, fill=False, ec=INK, lw=0.8))
    draw_text(
        axes, left + wide / 2, top + high / 2, text, color=pick_text_color(COLORS[rank]), **look
    )


def draw_blank(axes: Axes, place: Corner, **look: object) -> None:
    left, top, wide, high = place
    look = {"ls": (0, (2, 2)), "lw": 0.7, "alpha": 0.5, **look}
    axes.add_patch(Rectangle((left, top), wide, high, fill=False, ec=INK, **look))


def ring() -> Figure:
    """Ring attention on four ranks, in four turns. Each rank keeps its queries. In turn 0 it has
    its own keys and values; after each turn it sends the keys and values that it has to the next
    rank, the last rank to the first. After four turns each rank has had all four pieces.
    """
    figure, axes = make_canvas(6.6, 3.05)
    size, row, turn = 0.38, 0.6, 1.55
    for step in range(N):
        x = 0.7 + step * turn
        draw_title(axes, x + size, 0.14, f"turn {step}", fontsize=10)
        for i, name in enumerate(("Q", "KV")):
            draw_text(axes, x + (i + 0.5) * size, 0.46, name, fontsize=SMALL)
        for rank in range(N):
            y, source = 0.62 + rank * row, (rank - step) % N
            draw_text(axes, 0.6, y + size / 2, f"rank {rank}" * (step == 0), ha="right")
            draw_tile(axes, (x, y, size, size), rank, str(rank))
            draw_tile(axes, (x + size, y, size, size), source, str(source))
            if step < N - 1:
                low = 0.62 + (rank + 1) % N * row + size / 2
                begin, end = (x + 2 * size + 0.04, y + size / 2), (x + turn - 0.05, low)
                draw_arrow(axes, begin, end, lw=1.1, color=INK)
    return figure


def count_squares(layout: str, rank: int) -> list[float]:
    """Return a rank's compute in each turn of the ring, in squares of a rank's tokens."""
    tokens = 2**14  # so many that half a square plus half its diagonal rounds to half a square
    return [pairs / tokens**2 for pairs in cp.count_pairs_by_turn(layout, tokens * N, N)[rank]]


def zigzag() -> Figure:
    """The causal mask over eight pieces of a sequence, whose queries belong to four ranks, in two
    layouts. Contiguous, rank 0 has pieces 0 and 1 and rank 3 pieces 6 and 7: the ranks do 1, 3, 5
    and 7 sixteenths of the work. Zig-zag, rank r has pieces r and 7 - r: each rank does 4.
    """
    figure, axes = make_canvas(6.5, 3.85)
    size, pieces = 0.235, 2 * N
    for number, layout in enumerate(cp.LAYOUTS):
        left, top = 0.55 + number * 3.25, 0.55
        draw_title(axes, left + pieces * size / 2, 0.14, layout.replace("zigzag", "zig-zag"))
        draw_text(axes, left + pieces * size / 2, 0.42, "keys", fontsize=SMALL)
        draw_text(axes, left - 0.44, top + 4 * size, "queries of rank", fontsize=SMALL, rotation=90)
        positions = {r: cp.token_positions(layout, pieces, N, r).tolist() for r in range(N)}
        owner = {piece: rank for rank, mine in positions.items() for piece in mine}
        for q in range(pieces):
            y = top + q * size
            draw_text(axes, left - 0.16, y + size / 2, str(owner[q]), fontsize=SMALL)
            for k in range(pieces):
                x = left + k * size
                if k < q:
                    draw_tile(axes, (x, y, size, size), owner[q])
                else:
                    draw_blank(axes, (x, y, size, size), alpha=0.3)
                if k == q:
                    corners = [(x, y), (x, y + size), (x + size, y + size)]
                    axes.add_patch(Polygon(corners, fc=COLORS[owner[q]], ec=INK, lw=0.8))
        for rank in range(N):
            done = sum(count_squares(layout, rank))
            y = 2.62 + rank * 0.28
            draw_text(axes, left - 0.06, y + 0.1, f"rank {rank}", ha="right", fontsize=SMALL)
            draw_tile(axes, (left, y, done * 0.5, 0.2), rank)
            draw_text(axes, left + done * 0.5 + 0.2, y + 0.1, f"{done * 2:.0f}/16", fontsize=SMALL)
    return figure


def idle() -> Figure:
    """Timeline of a causal ring on four ranks. Contiguous, rank 0 computes with its own keys only,
    rank 3 with all four blocks, and the other ranks wait for rank 3. Zig-zag, each rank has half a
    block to compute in every turn: all end together, after four sevenths of the time.
    """
    figure, axes = make_canvas(6.5, 3.42)
    unit, tall, left = 1.5, 0.26, 0.7
    for number, layout in enumerate(cp.LAYOUTS):
        top = 0.4 + number * 1.55
        draw_title(
            axes, left, top - 0.24, layout.replace("zigzag", "zig-zag"), ha="left", fontsize=10
        )
        for rank in range(N):
            y, now = top + rank * (tall + 0.03), 0.0
            draw_text(axes, left - 0.08, y + tall / 2, f"rank {rank}", ha="right", fontsize=SMALL)
            for step, area in enumerate(count_squares(layout, rank)):
                if area:
                    source = (rank - step) % N
                    draw_tile(
                        axes, (left + now * unit, y, area * unit, tall), source, f"KV {source}"
                    )
                    now += area
            wait = max(sum(count_squares(layout, r)) for r in range(N)) - now
            draw_blank(axes, (left + now * unit, y, wait * unit, tall))
    draw_arrow(axes, (left, 3.28), (left + 3.5 * unit, 3.28), lw=1)
    draw_text(axes, left - 0.08, 3.28, "time", ha="right", fontsize=SMALL)
    return figure


def ulysses() -> Figure:
    """Four pieces of a sequence and four heads on four ranks. Before, each rank has one piece with
    all heads. An all-to-all gives each rank one head with all pieces, and its attention sees the
    whole sequence. A second all-to-all returns the outputs to the ranks of their tokens.
    """
    figure, axes = make_canvas(6.5, 2.35)
    size, top, tokens = 0.36, 0.55, "own tokens, all heads"
    for number, name in enumerate((tokens, "all tokens, own head", tokens)):
        left, end = 0.75 + number * 2.15, 0.75 + number * 2.15 + N * size + 0.06
        draw_title(axes, left + 2 * size, 0.14, name, fontsize=SMALL)
        for i in range(N):
            draw_text(axes, left + (i + 0.5) * size, 0.42, f"h{i}", fontsize=SMALL)
            draw_text(axes, left - 0.16, top + (i + 0.5) * size, f"s{i}", fontsize=SMALL)
            for j in range(N):
                owner = j if number == 1 else i
                draw_tile(axes, (left + j * size, top + i * size, size, size), owner, str(owner))
        if number < 2:
            draw_arrow(axes, (end, top + 2 * size), (end + 0.44, top + 2 * size))
            draw_text(axes, end + 0.2, top + 2 * size - 0.25, "all-\nto-all", fontsize=SMALL)
    draw_text(axes, 2.9 + 2 * size, 2.2, "attention over all tokens", fontsize=SMALL)
    return figure


def merge() -> Figure:
    """Four scores of one query, in two blocks. Block 0 has exponentials 2 and 1, sum 3, output 7;
    block 1 has 0.5 and 0.5, sum 1, output 6. Merged, the outputs are weighted by the sums, 3/4 and
    1/4: 6.75, as from all four scores together.
    """
    figure, axes = make_canvas(6.5, 2.3)
    blocks = (((2.0, 9.0), (1.0, 3.0)), ((0.5, 4.0), (0.5, 8.0)))  # (exp(score), value) of each key
    unit, base, bottom, total, merged = 0.5, 1.4, 1.4, 4.0, []
    for y, name in ((base - 0.4, "exp(score)"), (base + 0.16, "value")):
        draw_text(axes, 0.72, y, name, ha="right", fontsize=SMALL)
    for number, scores in enumerate(blocks):
        left = 0.82 + number * 1.5
        draw_title(axes, left + unit, 0.14, f"block {number}", fontsize=10)
        for i, (high, value) in enumerate(scores):
            x = left + i * unit
            draw_tile(axes, (x, base - high * unit, unit, high * unit), number, f"{high:g}")
            draw_text(axes, x + unit / 2, base + 0.16, f"{value:g}")
        size = sum(part for part, _ in scores)
        out = sum(part * value for part, value in scores) / size
        draw_text(axes, left + unit, base + 0.6, f"ℓ = log {size:g}\noutput {out:g}")
        bottom -= size / total
        draw_tile(axes, (4.5, bottom, 0.8, size / total), number, f"{size / total:g}")
        merged.append(f"{size / total:g} · {out:g}")
    draw_arrow(axes, (3.55, 1.0), (4.2, 1.0))
    draw_title(axes, 4.9, 0.14, "merged", fontsize=10)
    draw_text(axes, 4.9, base + 0.6, f"ℓ = log {total:g}\noutput {' + '.join(merged)} = 6.75")
    return figure


def fit() -> Figure:
    """Tokens of context that fit into 80 GB on each rank, for Llama 3 8B with tensor degree 8,
    over 1 to 64 context ranks. All lines double with the ranks. With sequence parallelism about
    twice as many tokens fit, with full recomputation four times, with both thirteen times.
    """
    show.set_style()
    figure, axes = plt.subplots(figsize=(4.4, 3.8))
    cases = {
        "tensor parallelism": Layout(tp=8),
        "full recomputation": Layout(tp=8, recompute="full"),
        "sequence parallelism": Layout(tp=8, sequence_parallel=True),
        "both": Layout(tp=8, recompute="full", sequence_parallel=True),
    }
    ranks = 1, 4, 16, 64
    for name, case in cases.items():
        layouts = [replace(case, cp=number) for number in ranks]
        most = (cp.find_max_context(PRESETS["llama-3-8b"], 80_000_000_000, one) for one in layouts)
        fitting = [tokens / 1000 for tokens in most]
        look = {"color": COLORS[4 + case.sequence_parallel], "lw": 2, "marker": "o"}
        look["ls"] = "--" if case.recompute == "full" else "-"
        axes.plot(ranks, fitting, **look)
        short = name.removeprefix("full ").removesuffix(" parallelism")
        axes.text(80, fitting[-1], short, va="center", fontsize=10)
    for tokens in (8192, 131_072):
        axes.axhline(tokens / 1000, color=INK, lw=0.8, ls=":")
        axes.text(64, tokens / 1000, f"{tokens:,} tokens", ha="right", va="bottom", fontsize=9.5)
    axes.set(xscale="log", yscale="log", xlim=(0.9, 64))
    axes.set(xlabel="context ranks, of 8 tensor ranks each", ylabel="tokens that fit (thousands)")
    for axis, ticks in ((axes.xaxis, (1, 4, 16, 64)), (axes.yaxis, (10, 100, 1000, 10_000))):
        axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    return figure


def main() -> None:
    for draw in (ring, zigzag, idle, ulysses, merge, fit):
        alt = " ".join(draw.__doc__.split())
        show.save_svg(draw(), HERE / f"context_parallel_{draw.__name__}.svg", alt)


if __name__ == "__main__":
    main()
