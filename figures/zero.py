"""Draw the pictures of the lesson `zero` (python figures/zero.py).

`zero_wrapping.svg` shows a real run, whose bytes are in `zero_wrapping.json`:
python figures/zero.py --measure repeats the run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardlab import memory, ranks, zero
from shardlab.common import show, text
from shardlab.common.show.drawing import (
    draw_arrow,
    draw_grid,
    draw_rank_names,
    draw_title,
    make_canvas,
    pick_text_color,
)
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.layout import Layout
from shardlab.measure import count

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
N = 4
ALL = tuple(range(N))
# The memory pictures distinguish kinds of memory, not ranks, so these are not the first four.
KINDS = {
    "activations": COLORS[7],
    "parameters": COLORS[4],
    "gradients": COLORS[5],
    "optimizer": COLORS[6],
}
Trace = list[tuple[float, int]]


def draw_stages() -> None:
    figure, axes = make_canvas(4.95, 4.6)
    size, between = 0.13, 0.13
    panels = (
        ("stage 0: data parallelism", ()),
        ("stage 1: shard the optimizer", ("O",)),
        ("stage 2: and the gradients", ("O", "G")),
        ("stage 3: and the weights", ("O", "G", "P")),
    )
    for number, (words, sharded) in enumerate(panels):
        x, y = 0.56 + 2.47 * (number % 2), 0.2 + 2.35 * (number // 2)
        axes.text(x - 0.51, y, words, va="center", weight="bold", fontsize=10)
        draw_rank_names(axes, x - 0.06, y + 0.5, 0.3, 0.09)
        for column, kind in enumerate("PGO"):
            left = x + column * (N * size + between)
            name = {"P": "weights", "G": "gradients", "O": "optimizer"}[kind]
            axes.text(left + N * size / 2, y + 0.33, name, ha="center", va="center", fontsize=9)
            for rank in range(N):
                top = y + 0.5 + rank * (0.3 + 0.09)
                for piece in range(N):
                    held = kind not in sharded or piece == rank
                    look = (
                        {"fc": COLORS[piece], "lw": 0.8, "ec": INK} if held else _get_empty_style()
                    )
                    place = (left + piece * size, top)
                    axes.add_patch(Rectangle(place, size, 0.3, **look))
    show.save_svg(
        figure,
        HERE / "zero_stages.svg",
        "What four ranks hold in ZeRO's stages; weights, gradients and optimizer states are each "
        "divided into four shards. Stage 0: every rank holds all shards of all three. Stage 1: "
        "each rank holds only its own shard of the optimizer states. Stage 2: also only its own "
        "shard of the gradients. Stage 3: also only its own shard of the weights.",
    )


def _get_empty_style() -> dict[str, object]:
    return {"fill": False, "ec": INK, "lw": 0.7, "ls": (0, (2, 2)), "alpha": 0.45}


def draw_step() -> None:
    figure, axes = make_canvas(6.4, 2.35)
    nothing: tuple[int, ...] = ()
    own = [[(rank,)] * N for rank in range(N)]
    summed = [[ALL if piece == rank else nothing for piece in ALL] for rank in ALL]
    y, wide = 0.62, N * 0.3
    draw_rank_names(axes, 0.56, y)
    places = (0.62, 0.62 + wide + 0.85, 0.62 + 2 * (wide + 0.85))
    labels = [[""] * N for _ in range(N)]
    draw_grid(axes, places[0], y, own)
    draw_grid(axes, places[1], y, summed, new=[(r, r) for r in ALL])
    # New weights: piece j has the colour of rank j, which computed it.
    draw_grid(axes, places[2], y, [[(piece,) for piece in ALL] for _ in ALL], labels=labels)
    heads = ("gradients,\nof each rank's own batch", "the average,\na shard on each", "new weights")
    for place, words in zip(places, heads, strict=True):
        axes.text(place + wide / 2, 0.3, words, ha="center", va="center", fontsize=10)
    middle = y + 2 * 0.39 - 0.045
    steps = ("reduce-\nscatter", "step, then\nall-gather")
    for place, words in zip(places[:2], steps, strict=True):
        draw_arrow(axes, (place + wide + 0.12, middle), (place + wide + 0.73, middle))
        where = (place + wide + 0.425, middle - 0.27)
        axes.text(*where, words, ha="center", va="center", fontsize=9)
    show.save_svg(
        figure,
        HERE / "zero_step.svg",
        "A step of ZeRO's stage 1 on four ranks. Each rank has gradients of its own batch. A "
        "reduce-scatter leaves rank r with shard r of their average. Rank r updates its shard of "
        "the weights, and an all-gather gives every rank all four new shards.",
    )


def draw_life() -> None:
    figure, axes = make_canvas(6.6, 3.75)
    slot, left, tall = 0.5, 0.98, 0.32
    compute = ["", "F1", "F2", "F3", "F4", "loss", "B4", "B3", "B2", "B1", ""]
    # (begin, end in slots, block, words): in the first half of a block's backward, communication is
    # the gradients of the following block; in the second half, the weights of the preceding block.
    sent = [(i, i + 1, i + 1, "g") for i in range(4)] + [(5, 6, 4, "g"), (6.5, 7, 3, "g")]
    sent += [(7, 7.5, 4, "r"), (7.5, 8, 2, "g"), (8, 8.5, 3, "r"), (8.5, 9, 1, "g")]
    sent += [(9, 9.5, 2, "r"), (10, 10.5, 1, "r")]
    whole = {1: [(0, 2), (8.5, 10)], 2: [(1, 3), (7.5, 9)], 3: [(2, 4), (6.5, 8)]}
    whole[4] = [(3, 5), (5, 7)]

    def draw_bar(begin: float, end: float, y: float, color: str, words: str) -> None:
        place = (left + begin * slot, y)
        axes.add_patch(Rectangle(place, (end - begin) * slot, tall, fc=color, ec=INK, lw=0.8))
        ink = INK if color == "none" else pick_text_color(color)
        middle = (left + (begin + end) / 2 * slot, y + tall / 2)
        axes.text(*middle, words, ha="center", va="center", color=ink, fontsize=10)

    axes.text(left - 0.1, 0.28, "computes", ha="right", va="center")
    axes.text(left - 0.1, 0.78, "link", ha="right", va="center")
    for i, words in enumerate(compute):
        if words:
            color = COLORS[int(words[1]) - 1] if words != "loss" else "none"
            draw_bar(i, i + 1, 0.12, color, words)
    for begin, end, block, kind in sent:
        draw_bar(begin, end, 0.62, COLORS[block - 1], kind)
    for row, block in enumerate((1, 2, 3, 4)):
        y = 1.42 + row * 0.44
        axes.text(left - 0.1, y + tall / 2, f"block {block}", ha="right", va="center")
        axes.plot([left, left + 10.5 * slot], [y + tall, y + tall], color=COLORS[block - 1], lw=4)
        for begin, end in whole[block]:
            draw_bar(begin, end, y, COLORS[block - 1], "")
    draw_title(axes, left, 1.2, "in memory: full (box) or a shard (line)", ha="left", fontsize=10)
    draw_title(
        axes, left, 3.32, "g: gather weights;  r: reduce-scatter gradients", ha="left", fontsize=10
    )
    draw_arrow(axes, (left, 3.58), (left + 10.5 * slot, 3.58), lw=1)
    axes.text(left - 0.1, 3.58, "time", ha="right", va="center")
    show.save_svg(
        figure,
        HERE / "zero_life.svg",
        "Stage 3 through a step, on one rank, with four blocks. While a block computes, the link "
        "gathers the next block's weights, in backward the previous block's; in the first half of "
        "a block's backward it carries the following block's gradients. Each block is full in "
        "memory twice, at most two blocks at a time; otherwise the rank holds only its shard.",
    )


def draw_memory() -> None:
    show.set_style()
    figure, axes = plt.subplots(figsize=(5.0, 3.5))
    params, activations = 7e9, 10e9
    for stage in range(4):
        held = memory.estimate_states(params, Layout(dp=8, zero=stage), "bf16", "adamw")
        parts = {"activations": activations, "optimizer": held.optimizer}
        parts |= {"gradients": held.gradients, "parameters": held.parameters}
        y = 0.0
        for kind, size in parts.items():
            high = size / 1e9
            axes.bar(stage, high, 0.5, y, color=KINDS[kind], edgecolor=INK, lw=0.8)
            label = f"{high:.4g}"
            if high > 5:
                style = {"ha": "center", "va": "center", "fontsize": 10}
                axes.text(stage, y + high / 2, label, color=pick_text_color(KINDS[kind]), **style)
            elif kind == "gradients":
                words = label if stage == 2 else f"{label} each"
                axes.text(stage + 0.28, y + high, words, va="center", fontsize=9)
            y += high
            if stage == 0:
                axes.text(-0.3, y - high / 2, kind, ha="right", va="center", fontsize=10)
        total = f"{y:.4g} GB"
        axes.text(stage, y + 2.5, total, ha="center", va="bottom", weight="bold")
    axes.plot([-0.25, 3.75], [122 / 8] * 2, color=INK, lw=1, ls=":", zorder=0)
    axes.text(3.8, 122 / 8, "122 / 8", va="center", fontsize=10)
    axes.set_xticks(range(4), [f"stage {stage}" for stage in range(4)], fontsize=10)
    axes.set_xlim(-1.65, 4.4)
    axes.set_ylim(0, 135)
    axes.set_ylabel("GB on each of 8 ranks")
    show.save_svg(
        figure,
        HERE / "zero_memory.svg",
        "Bytes on each of 8 ranks for 7 billion parameters in mixed precision: stage 0 has 122 GB, "
        "stage 1 48.5 GB, stage 2 36.25 GB, stage 3 24 GB. In each stage 10 GB are activations, so "
        "stage 3 stays above an eighth of 122 GB, which is 15.25 GB.",
    )


def held_over_a_step(units: str) -> tuple[Trace, int]:
    """Return this rank's held bytes over one training step, by seconds, and the bytes of states.

    units: "blocks" or "whole". An untraced step comes first: it creates the optimizer's states.
    """
    torch.manual_seed(0)
    model = GPT(PRESETS["mini"])
    sharded = zero.Zero3(model, dist.group.WORLD, units=None if units == "blocks" else [])
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, foreach=False)
    tokens, targets = text.get_batch(128, 1, start=dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        loss(sharded(tokens), targets).backward()
        optimizer.step()

    step()
    states = sum(zero.predict_state_bytes(sharded).values())
    dist.barrier()
    with count.track_memory(sharded, optimizer, trace=True) as held:
        step()
    assert held.trace is not None
    begin = held.trace[0][0]
    return [(seconds - begin, size) for seconds, size in held.trace], states


def thin_trace(trace: Trace, points: int = 300) -> list[list[float]]:
    """Thin the trace to [fraction of the step, least MB, most MB] in `points` intervals."""
    end = trace[-1][0]
    found: list[list[float]] = []
    last = trace[0][1]
    for number in range(points):
        low, high = end * number / points, end * (number + 1) / points
        inside = [last] + [size for seconds, size in trace if low <= seconds < high]
        last = inside[-1]
        found.append([number / points, min(inside) / 1e6, max(inside) / 1e6])
    return found


def plot_wrapping(runs: dict[str, list[list[float]]], states: float) -> Figure:
    """Plot a rank's held bytes over a step, wrapped per block and as a whole; states in MB."""
    show.set_style()
    figure, axes = plt.subplots(figsize=(6.4, 3.3))
    looks = {"whole": (COLORS[5], "one unit"), "blocks": (COLORS[0], "a unit per block")}
    for kind, (color, words) in looks.items():
        x = [100 * point[0] for point in runs[kind]]
        most = [point[2] for point in runs[kind]]
        axes.plot(x, most, color=color, lw=1.8, drawstyle="steps-post")
        peak = max(most)
        at = x[most.index(peak)]
        axes.annotate(
            f"{words}: peak {peak:.0f} MB",
            (at, peak),
            (2, peak + 4) if kind == "whole" else (27, peak - 20),
            color=color,
            weight="bold",
            va="bottom",
        )
    axes.axhline(states, color=INK, lw=1, ls=":")
    axes.text(100, states - 2, "shards of the states", ha="right", va="top", fontsize=9)
    axes.set_ylim(0, 1.18 * max(point[2] for run in runs.values() for point in run))
    axes.set_xlim(0, 100)
    axes.set_xlabel("progress of the step (%)")
    axes.set_ylabel("MB held by a rank")
    return figure


def draw_wrapping(measure: bool) -> None:
    path = HERE / "zero_wrapping.json"
    if measure:
        kept: dict[str, object] = {}
        for units in ("whole", "blocks"):
            trace, states = ranks.run(held_over_a_step, N, units, device="cpu", timeout=120)[0]
            kept[units] = thin_trace(trace)
            kept["states"] = states / 1e6
        rounded = json.loads(json.dumps(kept), parse_float=lambda digits: round(float(digits), 3))
        path.write_text(json.dumps(rounded) + "\n")
    runs = json.loads(path.read_text())
    states = runs.pop("states")
    peaks = {kind: max(point[2] for point in run) for kind, run in runs.items()}
    show.save_svg(
        plot_wrapping(runs, states),
        HERE / "zero_wrapping.svg",
        "Measured bytes on one of four ranks over a training step in stage 3. With the whole model "
        f"as one unit the peak is {peaks['whole']:.0f} MB; with a unit for each block it is "
        f"{peaks['blocks']:.0f} MB. The shards of the states alone take {states:.0f} MB.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure the bytes anew")
    chosen = parser.parse_args()
    draw_stages()
    draw_step()
    draw_life()
    draw_memory()
    draw_wrapping(chosen.measure)


if __name__ == "__main__":
    main()
