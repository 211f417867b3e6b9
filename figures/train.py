"""Draw the pictures of the lesson `train` (python figures/train.py)."""

from __future__ import annotations

from pathlib import Path

from shardlab.common import show
from shardlab.common.show.drawing import draw_arrow, draw_cell, draw_text, draw_title, make_canvas

HERE = Path(__file__).parent
INK = show.INK


def draw_order() -> None:
    figure, axes = make_canvas(6.2, 3.3)
    left, size = 1.5, 0.36
    order = [7, 2, 11, 5, 0, 9, 3, 12, 8, 1, 10, 4, 6]
    places = [left + i * size for i in range(len(order))]

    def draw_row(y: float, ranks: int, start: int, name: str) -> None:
        draw_title(axes, left - 0.14, y + size / 2, name, ha="right")
        for i, window in enumerate(order):
            holds = ((i - start) % ranks,) if i < 12 else ()
            if i >= start:
                draw_cell(axes, places[i], y, size, holds, str(window))

    def draw_bracket(y: float, first: int, last: int, text: str) -> None:
        a, b = places[first] + 0.03, places[last] + size - 0.03
        axes.plot([a, a, b, b], [y, y + 0.07, y + 0.07, y], color=INK, lw=1)
        draw_text(axes, (a + b) / 2, y + 0.2, text)

    draw_row(0.35, 2, 0, "two ranks")
    draw_bracket(0.78, 0, 3, "step 1")
    draw_bracket(0.78, 4, 7, "step 2")
    draw_bracket(0.78, 8, 11, "step 3")
    draw_text(axes, places[12] + size / 2, 0.98, "dropped")
    draw_text(axes, places[0], 0.18, "the order of one epoch, the same on all ranks", ha="left")
    x = places[8]
    axes.plot([x, x], [0.28, 2.62], color=INK, lw=1.4, ls=(0, (4, 2)))
    draw_text(axes, x - 0.08, 1.38, "stopped after step 2: place 8", ha="right")
    draw_arrow(axes, (x, 1.25), (x, 1.55))
    draw_row(1.62, 2, 8, "on two ranks")
    draw_row(2.2, 4, 8, "on four ranks")
    for rank in range(4):
        draw_cell(axes, left + 1.15 * rank, 2.95, 0.26, (rank,))
        draw_text(axes, left + 1.15 * rank + 0.36, 3.08, f"rank {rank}", ha="left")
    show.save_svg(
        figure,
        HERE / "train_order.svg",
        "The order of an epoch as a row of 13 windows, distributed over two ranks in turn: four "
        "windows are a step, and the last window is dropped. A run that stopped after step 2 "
        "continues at place 8 of the same order, on two ranks or on four.",
    )


if __name__ == "__main__":
    draw_order()
