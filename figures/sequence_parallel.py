"""Draw the pictures of the lesson `sequence_parallel` (python figures/sequence_parallel.py).

Tensors that are the same on every rank are pale; a tensor or a step of one rank has that rank's
colour. The docstring of a function that draws is the picture's alternative text.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import draw_text, draw_title, make_canvas, pick_text_color
from shardlab.memory import korthikanti_layer

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
SMALL = 9  # points; other text has 10 or 11
N = 4
Corner = tuple[float, float, float, float]  # left, top, width, height: inches


def draw_tile(axes: Axes, place: Corner, rank: int | None, text: str = "", **look: object) -> None:
    """Draw a box in a rank's colour; None: the same on every rank."""
    left, top, wide, high = place
    fill = {"fc": INK, "alpha": 0.13} if rank is None else {"fc": COLORS[rank]}
    axes.add_patch(Rectangle((left, top), wide, high, lw=0, **fill))
    axes.add_patch(Rectangle((left, top), wide, high, fill=False, ec=INK, lw=0.8))
    color = INK if rank is None else pick_text_color(COLORS[rank])
    draw_text(axes, left + wide / 2, top + high / 2, text, color=color, **look)


def draw_blank(axes: Axes, place: Corner, **look: object) -> None:
    left, top, wide, high = place
    look = {"ls": (0, (2, 2)), "lw": 0.7, "alpha": 0.5, **look}
    axes.add_patch(Rectangle((left, top), wide, high, fill=False, ec=INK, **look))


def block() -> Figure:
    """A block on four ranks, twice. Above, tensor parallelism: LayerNorms, dropouts and the
    residual stream are whole on every rank, attention and the feed-forward network are sharded by
    heads and columns, and an all-reduce is where a region ends, in backward where it begins. Below,
    with sequence parallelism: outside the regions each rank has a quarter of the tokens; an
    all-gather is where a region begins, a reduce-scatter where it ends, and in backward the
    reverse.
    """
    figure, axes = make_canvas(6.75, 5.2)
    tall, gap, step, high = 0.34, 0.11, 0.4, 1.54
    parts = (("norm", 0.46), ("enter", 0.3), ("region", 0.84), ("leave", 0.3), ("drop\nadd", 0.46))
    panels = {"tensor parallelism": ("nothing", "all-reduce")}
    panels["with sequence parallelism"] = "all-gather", "reduce-scatter"
    for number, (name, operators) in enumerate(panels.items()):
        top, x = 0.72 + number * 2.72, 0.7
        draw_title(axes, 0.05, top - 0.56, name, ha="left")
        draw_text(axes, 0.62, top + high + 0.26, "backward", fontsize=SMALL, ha="right")
        for rank in range(N):
            draw_text(axes, 0.62, top + rank * step + tall / 2, f"rank {rank}", ha="right")
        for inner in ("attention", "feed-\nforward"):
            for kind, wide in parts:
                middle = x + wide / 2
                if kind in ("enter", "leave"):
                    does, backward = operators if kind == "enter" else operators[::-1]
                    backward = backward.replace("-", "-\n")
                    draw_blank(axes, (x, top - 0.04, wide, high + 0.08), ls="-", lw=1.4, alpha=1)
                    draw_text(axes, middle, top + high / 2, does, rotation=90)
                    draw_text(axes, middle, top + high + 0.26, backward, fontsize=SMALL)
                else:
                    label = inner if kind == "region" else kind
                    draw_text(axes, middle, top - 0.2, label, fontsize=SMALL)
                    for rank in range(N):
                        y = top + rank * step
                        draw_blank(axes, (x, y, wide, tall))
                        heads = x + rank * wide / N, y, wide / N, tall
                        tokens = x, y + rank * tall / N, wide, tall / N
                        outside = (tokens, rank) if number else ((x, y, wide, tall), None)
                        draw_tile(axes, *((heads, rank) if kind == "region" else outside))
                x += wide + gap
    return figure


def memory() -> Figure:
    """Bytes of activations that one layer keeps, without scores, in units of sbh, for tensor
    degrees 1, 2, 4 and 8. Tensor parallelism alone: 34, 22, 16 and 13; of these 10 lie outside the
    sharded matrices and stay. With sequence parallelism, which divides them as well: 34, 17, 8.5
    and 4.25.
    """
    show.set_style()
    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    degrees, small = (1, 2, 4, 8), {"fontsize": 8, "label_type": "center", "color": "#000000"}
    s, h, a = 2048, 4096, 32  # any values: they cancel
    outside = ["outside\n10", *["10"] * 3], ["outside\n10", "10/2", "", ""]
    for group, sequence in enumerate((False, True)):
        look = {"x": [group * 5 + i for i in range(4)], "width": 0.85, "edgecolor": INK, "lw": 0.8}
        kept = [korthikanti_layer(s, 1, h, a, t, sequence, "selective") for t in degrees]
        inside = [24 / t for t in degrees]
        above = [size / (s * h) - low for size, low in zip(kept, inside, strict=True)]
        low = axes.bar(height=inside, color=COLORS[4], **look)
        high = axes.bar(height=above, bottom=inside, color=COLORS[6], **look)
        axes.bar_label(low, ["inside\n24", "24/2", "24/4", "24/8"], **small)
        axes.bar_label(high, outside[group], **small)
        axes.bar_label(high, [f"{size / (s * h):.4g}" for size in kept], padding=2, weight="bold")
        name = "with sequence parallelism" if sequence else "tensor parallelism"
        axes.text(group * 5 + 1.5, 38, name, ha="center", weight="bold")
    axes.set_xticks([*range(4), *range(5, 9)], [f"t = {t}" for t in degrees] * 2)
    axes.set(ylim=(0, 41), ylabel="bytes kept by a layer (sbh)")
    return figure


def main() -> None:
    for draw in (block, memory):
        alt = " ".join(draw.__doc__.split())
        show.save_svg(draw(), HERE / f"sequence_parallel_{draw.__name__}.svg", alt)


if __name__ == "__main__":
    main()
