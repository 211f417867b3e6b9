"""Draw the pictures of the lesson `data_parallel` (python figures/data_parallel.py).

`data_parallel_overlap.svg` shows a real run, whose times stand beside it in
`data_parallel_overlap.json`: python figures/data_parallel.py --measure runs it again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.patches import Rectangle
from torch.utils.data import DistributedSampler

from shardlab import ranks
from shardlab.common import show
from shardlab.common.show.drawing import draw_arrow, draw_box, draw_stripes, draw_title, make_canvas
from shardlab.data_parallel import overlap

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS


def draw_replicas() -> None:
    figure, axes = make_canvas(4.4, 4.55)
    left, width, gap = 0.05, 0.97, 0.14
    for rank in range(4):
        x = left + rank * (width + gap)
        middle_x = x + width / 2
        draw_title(axes, middle_x, 0.12, f"rank {rank}")
        for sample in range(4):
            square = Rectangle((x + 0.23 * sample + 0.04, 0.3), 0.2, 0.26, fc=COLORS[rank], lw=0)
            axes.add_patch(square)
        draw_arrow(axes, (middle_x, 0.62), (middle_x, 0.84))
        draw_box(axes, x, 0.88, width, 0.6, "all weights", "none")
        draw_arrow(axes, (middle_x, 1.52), (middle_x, 1.74))
        draw_box(axes, x, 1.78, width, 0.5, "gradients", COLORS[rank])
        draw_arrow(axes, (middle_x, 2.32), (middle_x, 2.5))
        draw_arrow(axes, (middle_x, 2.88), (middle_x, 3.06))
        draw_stripes(axes, x, 3.1, width, 0.5, (0, 1, 2, 3))
        draw_box(axes, x, 3.1, width, 0.5, "")
        draw_arrow(axes, (middle_x, 3.64), (middle_x, 3.86))
        draw_box(axes, x, 3.9, width, 0.6, "same step", "none")
    span = 4 * width + 3 * gap
    axes.add_patch(Rectangle((left, 2.53), span, 0.34, fill=False, ec=INK, lw=1.4))
    words = "all-reduce: every rank gets the average of all four"
    draw_title(axes, left + span / 2, 2.7, words, fontsize=10)
    show.save_svg(
        figure,
        HERE / "data_parallel_replicas.svg",
        "Four ranks. Each has a quarter of the batch, all weights, and computes gradients of its "
        "own. An all-reduce averages the gradients; then all four ranks have the same gradients "
        "and make the same optimizer step.",
    )


def draw_buckets() -> None:
    figure, axes = make_canvas(6.2, 2.84)
    # Widths of parameters in the module's order, first to last.
    widths = [0.95, 0.5, 0.7, 0.7, 0.5, 0.7, 0.7, 0.55]
    names = ["embed", "1a", "1b", "1c", "2a", "2b", "2c", "head"]
    buckets = [[7], [6, 5, 4], [3, 2, 1], [0]]
    shades, inks = [COLORS[0], COLORS[4]], ["#ffffff", "#000000"]
    number = {i: k for k, bucket in enumerate(buckets) for i in bucket}
    x, places = 0.1, []
    axes.text(0.1, 0.15, "parameters, in the module's order", va="center")
    for i, (width, name) in enumerate(zip(widths, names, strict=True)):
        axes.add_patch(Rectangle((x, 0.35), width, 0.42, fc=shades[number[i] % 2], ec=INK, lw=0.8))
        style = {"ha": "center", "va": "center", "fontsize": 10, "color": inks[number[i] % 2]}
        axes.text(x + width / 2, 0.56, name, **style)
        places.append(x + width / 2)
        x += width + 0.06
    draw_arrow(axes, (x - 0.1, 0.98), (0.1, 0.98))
    words = "backward finishes their gradients from right to left"
    axes.text(3, 1.16, words, ha="center", va="center", fontsize=10)
    x = 0.1
    for k, bucket in enumerate(buckets):
        begin = x
        for i in bucket:
            width = 0.72 * widths[i]
            axes.add_patch(Rectangle((x, 1.75), width, 0.42, fc=shades[k % 2], ec=INK, lw=0.8))
            style = {"ha": "center", "va": "center", "color": inks[k % 2], "fontsize": 9}
            axes.text(x + width / 2, 1.96, names[i], **style)
            x += width
        axes.text((begin + x) / 2, 1.58, f"bucket {k}", ha="center", va="center", fontsize=10)
        draw_arrow(axes, ((begin + x) / 2, 2.21), ((begin + x) / 2, 2.5))
        x += 0.3
    words = "one message each, bucket 0 first; it is small, so that sending starts early"
    axes.text(0.1, 2.66, words, va="center", fontsize=10)
    show.save_svg(
        figure,
        HERE / "data_parallel_buckets.svg",
        "Eight parameters in the module's order are put into four buckets, from the last to the "
        "first: the head alone in bucket 0, block 2 in bucket 1, block 1 in bucket 2, the "
        "embedding in bucket 3. Each bucket is one flat tensor and one message.",
    )


def draw_sampler() -> None:
    samples, size = list(range(10)), 4
    figure, axes = make_canvas(6.2, 2.45)
    for row, epoch in enumerate((0, 1)):
        y = 0.45 + 1.0 * row
        axes.text(0.05, y - 0.3, f"epoch {epoch}", va="center", fontweight="bold")
        columns = []
        for rank in range(size):
            sampler = DistributedSampler(samples, size, rank, shuffle=True, seed=0)
            sampler.set_epoch(epoch)
            columns.append(list(sampler))
        seen: set[int] = set()
        for place in range(len(columns[0])):
            for rank in range(size):
                sample = columns[rank][place]
                x = 0.05 + 0.5 * (place * size + rank) + 0.08 * place
                twice = {"ls": (0, (2, 1.5)), "lw": 2.4} if sample in seen else {"lw": 0.8}
                axes.add_patch(Rectangle((x, y), 0.42, 0.42, fc=COLORS[rank], ec=INK, **twice))
                dark = "#ffffff" if rank == 0 else "#000000"
                axes.text(x + 0.21, y + 0.21, sample, ha="center", va="center", color=dark)
                seen.add(sample)
    x = 0.05
    for rank in range(size):
        axes.add_patch(Rectangle((x, 2.12), 0.2, 0.2, fc=COLORS[rank], lw=0))
        axes.text(x + 0.26, 2.22, f"rank {rank}", va="center", fontsize=10)
        x += 0.95
    axes.add_patch(Rectangle((x, 2.12), 0.2, 0.2, fill=False, ec=INK, lw=2, ls=(0, (2, 1.5))))
    axes.text(x + 0.26, 2.22, "repeated sample", va="center", fontsize=10)
    show.save_svg(
        figure,
        HERE / "data_parallel_sampler.svg",
        "Ten samples, distributed over four ranks in turn, in a different order in each epoch. "
        "Each rank gets three, so two samples are repeated.",
    )


def draw_overlap(measure: bool) -> None:
    path = HERE / "data_parallel_overlap.json"
    if measure:
        # 50 microseconds, 1 Gbit/s; two ranks on a core each.
        runs = ranks.run(overlap.trace_steps, 2, 3, 15, 50e-6, 125e6, device="cpu", timeout=300)[0]
        kept = {name: overlap.pick_median(those) for name, those in runs.items()}
        rounded = json.loads(json.dumps(kept), parse_float=lambda digits: round(float(digits), 4))
        path.write_text(json.dumps(rounded) + "\n")
    runs = json.loads(path.read_text())
    show.save_svg(
        overlap.draw_timeline(runs["without"], runs["with"]),
        HERE / "data_parallel_overlap.svg",
        "Measured timeline of one training step, on one of two ranks joined by a 1 Gbit/s link. "
        f"Without overlap the link is idle until backward has ended, and a step takes "
        f"{1e3 * runs['without']['step']:.0f} ms. With overlap the link carries each bucket while "
        f"backward computes the next, and a step takes {1e3 * runs['with']['step']:.0f} ms.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure the timeline anew")
    chosen = parser.parse_args()
    draw_replicas()
    draw_buckets()
    draw_sampler()
    draw_overlap(chosen.measure)


if __name__ == "__main__":
    main()
