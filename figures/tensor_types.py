"""Draw the pictures of the lesson `tensor_types` (python figures/tensor_types.py).

Tensors that are the same on every rank are pale; a tensor of one rank has that rank's colour. The
docstring of a function that draws is the picture's alternative text.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import (
    draw_arrow,
    draw_text,
    draw_title,
    make_canvas,
    pick_text_color,
)

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
SMALL = 9  # points; other text has 10 or 11
CELL = 0.34


def draw_values(axes: Axes, x: float, y: float, numbers: tuple[str, str], same: bool) -> None:
    """Draw the values of two ranks side by side: pale if both are the same."""
    for rank, number in enumerate(numbers):
        left = x + rank * (CELL + 0.12)
        fill = {"fc": INK, "alpha": 0.13} if same else {"fc": COLORS[rank]}
        axes.add_patch(Rectangle((left, y), CELL, CELL, lw=0, **fill))
        axes.add_patch(Rectangle((left, y), CELL, CELL, fill=False, ec=INK, lw=0.8))
        color = INK if same else pick_text_color(COLORS[rank])
        draw_text(axes, left + CELL / 2, y + CELL / 2, number, color=color)


def draw_badge(axes: Axes, x: float, y: float, type_: str, wrong: bool = False) -> None:
    """Draw a type in a frame, a thick one if the type is wrong."""
    look = {"boxstyle": "round,pad=0.02,rounding_size=0.07", "fill": False, "ec": INK}
    frame = FancyBboxPatch((x - 0.15, y - 0.13), 0.3, 0.26, lw=2.4 if wrong else 0.8, **look)
    axes.add_patch(frame)
    draw_text(axes, x, y, type_, weight="bold")


def kinds() -> Figure:
    """The four types, on two ranks. I: both hold 3, and both hold the gradient, 5. R: both hold 3;
    their gradients are 2 and 3, partial sums of 5. V: they hold 3 and 4, with gradients 5 and 6. P:
    they hold 1 and 2, partial sums of 3, and both hold the gradient, 5.
    """
    figure, axes = make_canvas(6.1, 2.95)
    for at, text in ((0.85, "two ranks hold"), (2.85, "their gradients")):
        draw_title(axes, at + 0.4, 0.15, text, fontsize=10)
    rows = (
        ("I", ("3", "3"), True, ("5", "5"), True, "the same, with one gradient,\nwhich both have"),
        ("R", ("3", "3"), True, ("2", "3"), False, "the same, with partial\nsums of its gradient"),
        ("V", ("3", "4"), False, ("5", "6"), False, "each its own,\nwith its own gradient"),
        ("P", ("1", "2"), False, ("5", "5"), True, "partial sums,\nwith the sum's gradient"),
    )
    for number, (type_, holds, same, gradient, alike, text) in enumerate(rows):
        y = 0.36 + number * 0.66
        draw_title(axes, 0.35, y + CELL / 2, type_, fontsize=15)
        draw_values(axes, 0.85, y, holds, same)
        draw_values(axes, 2.85, y, gradient, alike)
        if type_ in "RP":
            draw_text(axes, (0.85 if type_ == "P" else 2.85) + CELL + 0.06, y + CELL / 2, "+")
        draw_text(axes, 4.1, y + CELL / 2, text, ha="left", fontsize=SMALL)
        draw_arrow(axes, (1.75, y + CELL / 2), (2.72, y + CELL / 2), lw=1.0, mutation_scale=9)
    return figure


STEPS = ("f", "· W₁", "gelu", "· W₂", "g", "+ b")


def chain() -> Figure:
    """A feed-forward network, by types. Above, with f: x is I, f makes it R; the product with the
    sharded W₁ is V, GELU leaves it V, the product with the sharded W₂ is V and is meant as P, g
    makes the sum, I, and the bias, which is I, is added. Gradients go back with the dual types: I,
    R, V, V, P, I. Below, without f: x is I and is multiplied by W₁, which is V. There the checker
    stops.
    """
    figure, axes = make_canvas(6.6, 2.75)
    panels = (
        (0.62, ["I", "R", "V", "V", "P", "I", "I"], ["I", "P", "V", "V", "R", "I", "I"], STEPS),
        (2.42, ["I", "?"], [], ("· W₁", "gelu", "· W₂", "g", "+ b")),
    )
    for top, forward, backward, steps in panels:
        name = "with f" if backward else "without f"
        draw_title(axes, 0.1, top - 0.42, name, ha="left", fontsize=10)
        for number, type_ in enumerate(forward):
            x = 0.75 + number * 0.9
            draw_badge(axes, x, top, type_, wrong=type_ == "?")
            if number < len(forward) - 1:
                draw_arrow(axes, (x + 0.2, top), (x + 0.7, top), lw=1.0, mutation_scale=9)
                draw_text(axes, x + 0.45, top - 0.17, steps[number], fontsize=SMALL)
            if backward:
                draw_text(axes, x, top + 0.62, backward[number], weight="bold")
                if number:
                    draw_arrow(axes, (x - 0.2, top + 0.62), (x - 0.7, top + 0.62), lw=1.0,
                          mutation_scale=9)  # fmt: skip
        if backward:
            draw_text(axes, 0.1, top, "x", ha="left")
            draw_text(axes, 0.1, top + 0.62, "gradient", ha="left", fontsize=SMALL)
            for at, text in ((3, "W₁ is V"), (5, "W₂ is V"), (7.05, "b is I")):
                draw_text(axes, 0.75 + (at - 1.55) * 0.9, top + 0.26, text, fontsize=SMALL)
        else:
            draw_text(axes, 0.1, top, "x", ha="left")
            text = "I is combined with V: each rank has its own W₁, so it would\n"
            text += "compute its own gradient for x, and nothing sums these"
            draw_text(axes, 2.0, top, text, ha="left", fontsize=SMALL)
    return figure


def step() -> Figure:
    """A step of data and tensor parallelism, by the types of a matrix on both axes, dp and tp. The
    matrix is R on dp and V on tp, the local loss V and I. The loss is declared a partial sum of the
    joint loss: P and I. Backward gives the matrix a gradient with the dual types, P and V. The
    all-reduce over dp makes it R and V, which are the matrix's own types, so the step is allowed.
    Without the all-reduce P is combined with R in the step.
    """
    figure, axes = make_canvas(6.6, 2.5)
    at = (0.6, 1.95, 3.3, 4.65, 6.0)
    stages = ("matrix", "local loss", "its share of\nthe joint loss", "gradient", "gradient")
    pairs = (("R", "V"), ("V", "I"), ("P", "I"), ("P", "V"), ("R", "V"))
    doing = ("forward", "declare", "backward", "all-reduce\nover dp")
    for axis, y in (("dp", 0.85), ("tp", 1.3)):
        draw_text(axes, 0.12, y, axis, fontsize=SMALL)
        for x, pair in zip(at, pairs, strict=True):
            draw_badge(axes, x, y, pair[axis == "tp"])
    for x, stage in zip(at, stages, strict=True):
        draw_title(axes, x, 0.35, stage, fontsize=SMALL)
    for left, right, text in zip(at, at[1:], doing, strict=False):
        draw_arrow(axes, (left + 0.3, 1.075), (right - 0.3, 1.075), lw=1.0, mutation_scale=9)
        draw_text(axes, (left + right) / 2, 1.08 - 0.22, text, fontsize=SMALL)
    draw_arrow(axes, (6.0, 1.6), (0.6, 1.6), connectionstyle="arc3,rad=-0.14", mutation_scale=9)
    draw_text(
        axes, 3.3, 2.2, "step: the gradient must have the matrix's types, R and V", fontsize=SMALL
    )
    return figure


def main() -> None:
    for draw in (kinds, chain, step):
        alt = " ".join(draw.__doc__.split())
        show.save_svg(draw(), HERE / f"tensor_types_{draw.__name__}.svg", alt)


if __name__ == "__main__":
    main()
