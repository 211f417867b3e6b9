"""Draw the pictures of the lesson `cluster` (python figures/cluster.py)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import draw_arrow, draw_box, draw_text, draw_title, make_canvas

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS


def draw_job() -> None:
    figure, axes = make_canvas(6.2, 4.55)

    def draw_machine(left: float, top: float, width: float, height: float) -> None:
        look = {"fill": False, "ec": INK, "lw": 1.4, "ls": (0, (4, 2))}
        axes.add_patch(Rectangle((left, top), width, height, **look))

    draw_title(axes, 0.05, 0.14, "login node", ha="left")
    draw_machine(0.05, 0.3, 1.65, 0.85)
    draw_box(axes, 0.2, 0.5, 1.35, 0.42, "sbatch")
    draw_title(axes, 2.3, 0.14, "scheduler", ha="left")
    draw_box(axes, 2.3, 0.5, 1.6, 0.42, "queue of jobs")
    draw_arrow(axes, (1.58, 0.71), (2.27, 0.71))
    for node, left in enumerate((0.05, 3.2)):
        draw_title(axes, left, 1.5, f"compute node {node + 1}", ha="left")
        draw_machine(left, 1.66, 2.95, 2.0)
        x = left + 0.95
        draw_box(axes, x, 2.45, 1.05, 0.38, "torchrun")
        for local in range(2):
            rank = 2 * node + local
            at = left + 0.3 + 1.3 * local
            draw_box(axes, at, 3.12, 1.05, 0.38, f"rank {rank}", COLORS[rank])
            draw_arrow(axes, (x + 0.52, 2.86), (at + 0.52, 3.09))
    draw_box(axes, 0.2, 1.8, 1.3, 0.38, "batch script")
    draw_arrow(axes, (2.75, 0.95), (1.35, 1.77))
    draw_text(axes, 2.35, 1.27, "when two nodes are free", ha="left", fontsize=9.5)
    draw_arrow(axes, (1.25, 2.21), (1.45, 2.42))
    draw_arrow(axes, (1.53, 2.05), (4.12, 2.55))
    draw_text(axes, 2.35, 2.02, "srun", ha="left", fontsize=9.5)
    draw_box(
        axes, 0.05, 3.95, 6.1, 0.4, "files that all nodes see: script, data, checkpoints, logs"
    )
    show.save_svg(
        figure,
        HERE / "cluster_job.svg",
        "On the left the login node, on which you call sbatch. The job goes into the queue, and "
        "the scheduler starts it when two nodes are free. On the first of two compute nodes the "
        "batch script runs, once. Its srun starts one torchrun on each node, and each torchrun "
        "starts two ranks. All nodes see one shared file system.",
    )


def main() -> None:
    draw_job()


if __name__ == "__main__":
    main()
