"""Draw the pictures of the lesson `elastic` (python figures/elastic.py)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import draw_arrow, draw_box, draw_text, draw_title, make_canvas

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS


def draw_rounds() -> None:
    figure, axes = make_canvas(6.2, 5.3)
    for node, left in enumerate((0.1, 3.2)):
        axes.add_patch(Rectangle((left, 0.3), 2.9, 1.5, fill=False, ec=INK, lw=1.4, ls=(0, (4, 2))))
        draw_title(axes, left + 0.05, 0.14, f"node {node}" + ", the host" * (not node), ha="left")
        draw_box(axes, left + (1.5 if not node else 0.3), 0.45, 1.1, 0.42, "agent")
        for local in range(2):
            rank = 2 * node + local
            x = left + 0.3 + 1.3 * local
            draw_box(axes, x, 1.25, 1.0, 0.4, f"rank {rank}", COLORS[rank])
            agent = left + (2.05 if not node else 0.85)
            draw_arrow(axes, (agent, 0.9), (x + 0.5, 1.22))
    draw_box(axes, 0.2, 0.45, 0.85, 0.42, "store")
    axes.annotate("", (1.58, 0.66), (1.07, 0.66), arrowprops={"arrowstyle": "<->", "color": INK})
    bent = {"arrowstyle": "<->", "color": INK, "connectionstyle": "arc3,rad=0.11"}
    axes.annotate("", (0.62, 0.44), (4.05, 0.44), arrowprops=bent)

    left, unit = 0.75, 1.0
    spans = {0: (0.35, 2.0), 1: (3.4, 5.3)}
    draw_title(axes, left + 1.17, 2.14, "round 0, port 43545", fontsize=10)
    draw_title(axes, left + 4.35, 2.14, "round 1, port 45643", fontsize=10)
    for rank in range(4):
        y = 2.35 + 0.48 * rank
        draw_text(axes, 0.65, y + 0.17, f"rank {rank}", ha="right")
        for number, (begin, end) in spans.items():
            last = end
            if number == 0 and rank != 3:
                last = 2.55 + 0.08 * (rank != 2)
            color = COLORS[rank]
            width = unit * (last - begin)
            draw_box(axes, left + unit * begin, y, width, 0.34, "", color)
    x = left + 2.0
    draw_text(axes, x + 0.09, 2.35 + 0.48 * 3 + 0.17, "×", weight="bold", fontsize=14, color=INK)
    for at, label in ((2.0, "rank 3\ndies"), (2.42, "stop"), (3.3, "run")):
        axes.plot([left + at] * 2, [2.25, 4.35], color=INK, lw=1, ls=(0, (2, 2)))
        draw_text(axes, left + at, 4.58, label, fontsize=9.5)
    draw_text(axes, left + 2.98, 3.1, "all are\nready", fontsize=9.5)
    draw_arrow(axes, (left, 4.95), (left + 5.35, 4.95))
    draw_text(axes, left + 5.35, 5.12, "time", ha="right")
    show.save_svg(
        figure,
        HERE / "elastic_rounds.svg",
        "Two nodes, each with an agent and two ranks; the store is on node 0, the node of the "
        "host, and both agents use it. Below, time: in round 0 four ranks run, then rank 3 dies. "
        "The host orders a stop, all ranks end, and when all agents are ready it orders round 1, "
        "in which all four ranks start again and connect at another port.",
    )


def main() -> None:
    draw_rounds()


if __name__ == "__main__":
    main()
