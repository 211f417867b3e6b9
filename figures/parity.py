"""Draw the pictures of the lesson `parity` (python figures/parity.py).

The docstring of a function that draws is the picture's alternative text.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from shardlab.common import show
from shardlab.common.show.drawing import draw_arrow, draw_cell, draw_text, draw_title, make_canvas

HERE = Path(__file__).parent
INK = show.INK
SIZE = 0.32


def draw_parts() -> Figure:
    """Three ways in which parts of two ranks make a full tensor of four rows. Consecutive: rank 0
    has rows 0 and 1, rank 1 rows 2 and 3. Alternating: rank 0 has rows 0 and 2, rank 1 rows 1 and
    3. Partial sums: each rank has four rows of its own, and only their sum is the full tensor.
    """
    figure, axes = make_canvas(6.4, 2.2)
    ways = (
        ("consecutive", ("0", "1"), ("2", "3"), ((0,), (0,), (1,), (1,))),
        ("alternating", ("0", "2"), ("1", "3"), ((0,), (1,), (0,), (1,))),
        ("partial sums", ("a", "b", "c", "d"), ("a′", "b′", "c′", "d′"), ((0, 1),) * 4),
    )
    for number, (name, first, second, whole) in enumerate(ways):
        x = 0.15 + number * 2.15
        draw_title(axes, x + 0.95, 0.14, name, fontsize=10)
        for rank, rows in enumerate((first, second)):
            left = x + rank * 0.5
            draw_text(axes, left + SIZE / 2, 0.42, f"rank {rank}", fontsize=9)
            for i, label in enumerate(rows):
                draw_cell(axes, left, 0.58 + i * (SIZE + 0.05), SIZE, (rank,), label)
        draw_arrow(axes, (x + 1.0, 1.25), (x + 1.32, 1.25), lw=1.0, mutation_scale=9)
        draw_text(axes, x + 1.58, 0.42, "full", fontsize=9)
        for i, holds in enumerate(whole):
            label = str(i) if number < 2 else "+"
            draw_cell(axes, x + 1.42, 0.58 + i * (SIZE + 0.05), SIZE, holds, label)
    return figure


def draw_step() -> Figure:
    """A step in five phases, from left to right: weights, outputs, gradients of outputs, gradients,
    updates. Weights, gradients and updates are the ends, framed: they must be in the weight's
    place, with factor 1, on each rank that holds the weight. Outputs may be in any place or be
    partial sums; their gradients may have a factor for each rank: both only show where a mistake
    began.
    """
    figure, axes = make_canvas(6.6, 1.95)
    phases = (
        ("weights", "before the\nfirst step", True),
        ("outputs", "any place, or\npartial sums", False),
        ("gradients\nof outputs", "a factor for\neach rank", False),
        ("gradients", "in the\nweight's place", True),
        ("updates", "in the\nweight's place", True),
    )
    for number, (name, rule, strict) in enumerate(phases):
        x = 0.1 + number * 1.3
        look = {"boxstyle": "round,pad=0.02,rounding_size=0.07", "ec": INK, "fill": False}
        frame = FancyBboxPatch((x, 0.35), 1.1, 0.6, lw=2.4 if strict else 0.8, **look)
        frame.set_linestyle("-" if strict else (0, (3, 2)))
        axes.add_patch(frame)
        draw_title(axes, x + 0.55, 0.65, name, fontsize=10)
        draw_text(axes, x + 0.55, 1.3, rule, fontsize=9)
        draw_title(axes, x + 0.55, 0.16, "strict" if strict else "lenient", fontsize=9)
        if number:
            draw_arrow(axes, (x - 0.17, 0.65), (x - 0.03, 0.65), lw=1.0, mutation_scale=9)
    draw_text(axes, 0.65, 1.72, "places are learned", fontsize=9)
    draw_text(axes, 2.6, 1.72, "show where a mistake began", fontsize=9)
    draw_text(axes, 5.2, 1.72, "decide whether the step is right", fontsize=9)
    return figure


def draw_mistakes() -> Figure:
    """A training step in seven parts, and the published mistakes in each. Forward: one dropout mask
    for all ranks, Megatron-LM 1256. Loss: a mean of means, transformers 34191. Backward: a partial
    sum as gradient, torchtitan 1805. Accumulation: only the last micro-batch, open-instruct 1498.
    All-reduce: no sum, Megatron-LM 7452; a sum in 16 bits, pytorch 190626; a sum not divided,
    Megatron-LM 5956. Clipping: on one rank, DeepSpeed 1801; by each rank's own norm, Automodel
    3816. Optimizer: AdamW in place of Muon, DeepSpeed 8437.
    """
    figure, axes = make_canvas(7.3, 2.75)
    parts = (
        ("forward", ("one mask", "Megatron-LM", "1256")),
        ("loss", ("mean of means", "transformers", "34191")),
        ("backward", ("partial sum", "torchtitan", "1805")),
        ("accumulation", ("only the last", "open-instruct", "1498")),
        (
            "all-reduce",
            ("no sum", "Megatron-LM", "7452"),
            ("in 16 bits", "pytorch", "190626"),
            ("not divided", "Megatron-LM", "5956"),
        ),
        ("clipping", ("on one rank", "DeepSpeed", "1801"), ("own norms", "Automodel", "3816")),
        ("optimizer", ("not Muon", "DeepSpeed", "8437")),
    )
    for number, (name, *mistakes) in enumerate(parts):
        x = 0.1 + number * 1.04
        look = {"boxstyle": "round,pad=0.02,rounding_size=0.07", "ec": INK, "fill": False}
        axes.add_patch(FancyBboxPatch((x, 0.1), 0.84, 0.36, lw=1.0, **look))
        draw_text(axes, x + 0.42, 0.28, name, fontsize=9)
        if number:
            draw_arrow(axes, (x - 0.17, 0.28), (x - 0.03, 0.28), lw=1.0, mutation_scale=9)
        for row, (mistake, project, thread) in enumerate(mistakes):
            y = 0.72 + row * 0.7
            draw_title(axes, x + 0.42, y, mistake, fontsize=9)
            draw_text(axes, x + 0.42, y + 0.18, project, fontsize=9)
            draw_text(axes, x + 0.42, y + 0.34, thread, fontsize=9)
    return figure


def main() -> None:
    """Draw the pictures into this file's folder."""
    for draw in (draw_parts, draw_step, draw_mistakes):
        alt = " ".join((draw.__doc__ or "").split())
        show.save_svg(draw(), HERE / f"parity_{draw.__name__.removeprefix('draw_')}.svg", alt)


if __name__ == "__main__":
    main()
