"""Draw the pictures of the lesson `model_parallelism` (python figures/model_parallelism.py).

Tensors that are the same on every rank are pale; a tensor on one rank has that rank's colour. All
pictures are narrow, so that a phone shows them whole. The docstring of a function that draws is the
picture's alternative text.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from shardlab import memory
from shardlab.common import show
from shardlab.common.shapes import PRESETS
from shardlab.common.show.drawing import (
    Point,
    draw_arrow,
    draw_text,
    draw_title,
    make_canvas,
    pick_text_color,
)
from shardlab.layout import Layout
from shardtools import strategy

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
WEIGHTS, GRADIENTS, MOMENTS, ACTIVATIONS = COLORS[4:8]  # as in the lesson Memory
SMALL = 9.2  # points: 9 pixels on a phone, where these pictures are 328 pixels wide
WIDE = 4.4  # inches
N = 4
SAME, NONE = -1, -2  # in place of a rank: the same on every rank; not here
EFFECTS = {  # effect of each technique of the strategy's chart
    "data parallel": "every GPU has a full replica of the model",
    "ZeRO-1": "optimizer states sharded over the replicas",
    "ZeRO-2": "gradients sharded, too",
    "ZeRO-3": "weights sharded, too, if the link is fast enough",
    "recompute": "layers keep only their inputs; ZeRO as before",
    "tensor in the node": "matrices sharded over 2, 4, … GPUs of a node",
    "pipeline across nodes": "layers split into stages on several nodes",
    "the host's memory": "optimizer, or all states, on the host: slowest",
}
Corner = tuple[float, float, float, float]  # left, top, width, height: inches


def draw_piece(axes: Axes, place: Corner, rank: int) -> None:
    """Draw a piece that `rank` holds."""
    left, top, wide, high = place
    look = {"fc": INK, "alpha": 0.16} if rank == SAME else {"fc": COLORS[rank]}
    axes.add_patch(Rectangle((left, top), wide, high, lw=0, **look))
    axes.add_patch(Rectangle((left, top), wide, high, fill=False, ec=INK, lw=0.7))


def draw_bar(axes: Axes, place: Corner, holders: list[int]) -> None:
    """Draw pieces side by side, each with its holder; a dashed outline if some have none."""
    left, top, wide, high = place
    each = wide / len(holders)
    if NONE in holders:
        faint = {"fill": False, "ec": INK, "ls": (0, (2, 2)), "lw": 0.6, "alpha": 0.6}
        axes.add_patch(Rectangle((left, top), wide, high, **faint))
    for i, rank in enumerate(holders):
        if rank != NONE:
            draw_piece(axes, (left + i * each, top, each, high), rank)


def draw_tile(axes: Axes, place: Corner, rank: int, text: str) -> None:
    """Draw a piece of `rank` with a text in it."""
    left, top, wide, high = place
    draw_piece(axes, place, rank)
    color = pick_text_color(COLORS[rank])
    draw_text(axes, left + wide / 2, top + high / 2, text, color=color, fontsize=SMALL)


def ways() -> Figure:
    """Four ways to train one model of four layers on four ranks. Data parallelism: each rank has a
    quarter of the batch and all four layers; gradients are sent. ZeRO, stage 3: each rank has a
    quarter of the batch, and a quarter of every layer's weights, gradients and optimizer states;
    weights and gradients are sent. Pipeline: each rank has one layer, and the whole batch passes
    through all of them; activations are sent to the next rank. Tensor parallelism: each rank has
    the whole batch and a quarter of every layer's matrices; activations are summed in every layer.
    """
    figure, axes = make_canvas(WIDE, 5.0)
    size, between, high = 0.4, 0.06, 0.19
    panels = (
        ("data parallelism", "gradients,\nonce per step"),
        ("ZeRO, stage 3", "weights and gradients,\nof every layer"),
        ("pipeline", "activations,\nto the next stage"),
        ("tensor parallelism", "activations,\nsummed in every layer"),
    )
    for number, (name, sent) in enumerate(panels):
        x, y = 0.55 + 2.03 * (number % 2), 0.14 + 2.52 * (number // 2)
        draw_title(axes, x, y, name, ha="left", fontsize=11)
        for row, text in ((0.3, "rank"), (0.57, "batch"), (1.25, "layers"), (2.02, "sends")):
            if number % 2 == 0:
                draw_text(axes, x - 0.08, y + row, text, ha="right", fontsize=SMALL)
        for rank in range(N):
            left = x + rank * (size + between)
            draw_text(axes, left + size / 2, y + 0.3, str(rank), fontsize=SMALL)
            own = [rank if i == rank else NONE for i in range(N)]
            draw_bar(axes, (left, y + 0.49, size, 0.17), own if number < 2 else [SAME])
            for layer in range(N):
                top = y + 0.85 + layer * (high + 0.03)
                holders = ([SAME], own, [rank if layer == rank else NONE], own)[number]
                draw_bar(axes, (left, top, size, high), holders)
        draw_text(axes, x, y + 2.02, sent, ha="left", fontsize=SMALL)
    return figure


def step() -> Figure:
    """Memory of one GPU during a step of Llama 3 8B in float32. Weights and AdamW's two means, 96
    GB together, are there all the time. Activations grow during forward, to 101 GB. During backward
    they are freed, and gradients take their place, up to 32 GB. The peak of 198 GB is at the end of
    forward; the four parts add up to 230 GB.
    """
    needs = memory.estimate_step(PRESETS["llama-3-8b"], precision="fp32", device="gpu")
    parts = (needs.parameters, needs.optimizer, needs.gradients, needs.activations)
    weights, means, gradients, activations = (size / 1e9 for size in parts)
    figure, axes = make_canvas(WIDE, 3.35)
    left, bottom, forward, backward, end = 0.55, 2.75, 1.75, 3.55, 3.9  # inches
    tall = 2.35 / 240  # inches a GB

    def get_height(size: float) -> float:
        return bottom - size * tall

    base = weights + means
    for low, size, color, name in (
        (0, weights, WEIGHTS, "weights"),
        (weights, means, MOMENTS, "AdamW's two means"),
    ):
        place = (left, get_height(low + size)), end - left, size * tall
        axes.add_patch(Rectangle(*place, fc=color, ec=INK, lw=0.7))
        middle = (left + end) / 2, get_height(low + size / 2)
        draw_text(
            axes, *middle, f"{name}, {size:.0f} GB", color=pick_text_color(color), fontsize=SMALL
        )
    grown = [(forward, get_height(base)), (backward, get_height(base + gradients))]
    grown += [(end, get_height(base + gradients)), (end, get_height(base))]
    axes.add_patch(Polygon(grown, fc=GRADIENTS, ec=INK, lw=0.7))
    top = [(left, get_height(base)), (forward, get_height(base + activations)), grown[1], grown[0]]
    axes.add_patch(Polygon(top, fc=ACTIVATIONS, ec=INK, lw=0.7))
    x, y = forward - 0.02, get_height(base + 0.36 * activations)
    text = f"activations,\n{activations:.0f} GB"
    draw_text(axes, x, y, text, color=pick_text_color(ACTIVATIONS), fontsize=SMALL)
    text = f"gradients,\n{gradients:.0f} GB"
    draw_text(axes, end, get_height(base + 66), text, ha="right", fontsize=SMALL)
    axes.plot([end - 0.18] * 2, [get_height(base + 50), get_height(base + 20)], color=INK, lw=0.8)
    for size, text in (
        (needs.peak / 1e9, f"peak {needs.peak / 1e9:.0f} GB"),
        (base + gradients + activations, f"sum of the parts {sum(parts) / 1e9:.0f} GB"),
    ):
        axes.plot([left, end], [get_height(size)] * 2, color=INK, lw=1.0, ls=(0, (3, 2)))
        draw_title(axes, end, get_height(size) - 0.09, text, ha="right", fontsize=SMALL)
    for begin, stop, name in ((left, forward, "forward"), (forward, backward, "backward")):
        draw_text(axes, (begin + stop) / 2, bottom + 0.15, name, fontsize=10)
        axes.plot([stop, stop], [bottom, bottom + 0.22], color=INK, lw=0.8)
    draw_text(axes, (backward + end) / 2, bottom + 0.15, "step", fontsize=10)
    draw_arrow(axes, (left, bottom + 0.36), (end, bottom + 0.36), lw=1.0)
    draw_text(axes, (left + end) / 2, bottom + 0.5, "time", fontsize=SMALL)
    for size in (0, 100, 200):
        draw_text(axes, left - 0.08, get_height(size), str(size), ha="right", fontsize=SMALL)
        axes.plot([left - 0.05, left], [get_height(size)] * 2, color=INK, lw=0.8)
    draw_text(axes, 0.02, 0.2, "GB", ha="left", fontsize=SMALL)
    return figure


Work = tuple[int, float, float, str, int]  # stage, begin, end, "F" or "B", micro-batch


def simulate_passes(order: list[list[tuple[str, int]]], micro: int) -> list[Work]:
    """Compute when each pass runs: a forward takes 1/micro, a backward twice as long.

    order: each stage's passes as (kind, micro-batch), kinds "F" and "B".
    """
    stages, unit = len(order), 1 / micro
    free, done, works = [0.0] * stages, {}, []
    todo = [list(row) for row in order]
    while any(todo):
        for stage, row in enumerate(todo):
            while row:
                kind, m = row[0]
                before = stage - 1 if kind == "F" else stage + 1
                waits = (kind, before, m) if 0 <= before < stages else ("F", stage, m)
                if waits != (kind, stage, m) and waits not in done:
                    break
                begin = max(free[stage], done.get(waits, 0.0))
                free[stage] = done[kind, stage, m] = begin + unit * (1 if kind == "F" else 2)
                works.append((stage, begin, free[stage], kind, m))
                row.pop(0)
    return works


def bubble() -> Figure:
    """Three timelines of four stages on one axis; a backward takes twice as long as a forward.
    Naive: the whole batch at once, one stage computes at a time, each is busy 25 % of the time.
    GPipe with four micro-batches: all forwards, then all backwards; stages overlap, each is busy
    57 % of the time. 1F1B with four micro-batches: each backward begins as early as it can; it
    takes exactly as long as GPipe.
    """
    forwards, backwards = ([(kind, m) for m in range(N)] for kind in "FB")
    early = []
    for stage in range(N):
        warm = N - 1 - stage
        pairs = [w for m in range(N - warm) for w in (forwards[warm + m], backwards[m])]
        early.append(forwards[:warm] + pairs + backwards[N - warm :])
    figure, axes = make_canvas(WIDE, 4.42)
    left, high, unit = 0.62, 0.225, (WIDE - 0.62 - 0.04) / 12
    panels = (
        ("naive: the whole batch at once", [[("F", 0), ("B", 0)]] * N, 1),
        ("GPipe: four micro-batches", [forwards + backwards] * N, N),
        ("1F1B: backwards as early as possible", early, N),
    )
    for number, (name, order, micro) in enumerate(panels):
        y = 0.14 + 1.39 * number
        works = simulate_passes(order, micro)
        length = max(work[2] for work in works)
        draw_title(axes, 0.04, y, name, ha="left", fontsize=10)
        draw_text(axes, WIDE - 0.04, y, f"busy {100 * 3 / length:.0f} %", ha="right", fontsize=10)
        for stage in range(N):
            top = y + 0.17 + stage * (high + 0.03)
            draw_text(
                axes, left - 0.08, top + high / 2, f"rank {stage}", ha="right", fontsize=SMALL
            )
            wide = length * unit
            axes.add_patch(Rectangle((left, top), wide, high, fill=False, ec=INK, lw=0.5))
        for stage, begin, end, kind, m in works:
            top = y + 0.17 + stage * (high + 0.03)
            place = (left + begin * unit, top), (end - begin) * unit, high
            pale = 0.55 if kind == "F" else 1.0
            axes.add_patch(Rectangle(*place, fc=COLORS[stage], alpha=pale, lw=0))
            axes.add_patch(Rectangle(*place, fill=False, ec=INK, lw=0.7))
            middle = left + (begin + end) / 2 * unit, top + high / 2
            look = {"color": INK if kind == "F" else pick_text_color(COLORS[stage])}
            if end - begin > 0.3:
                label = str(m + 1) if micro > 1 else "all"
                draw_text(axes, *middle, label, fontsize=SMALL, **look)
    text = "pale: forward; full: backward of micro-batch 1, 2, …"
    draw_text(axes, left, 4.3, text, ha="left", fontsize=SMALL)
    return figure


def ffn() -> Figure:
    """A feed-forward network on four ranks. Every rank has all of X. The first matrix is sharded by
    columns, a quarter for each rank, and so are its product with X and the GELU of that. The second
    matrix is sharded by rows, a quarter for each rank. Each rank then has a partial sum of Y, as
    large as all of Y; an all-reduce adds the four.
    """
    figure, axes = make_canvas(WIDE, 4.1)
    ranks = list(range(N))
    narrow, wide, tall = 0.62, 1.24, 0.5  # inches: X, inner matrix, tokens
    one, two = 0.5, 1.62
    # XW₁, from the left: X, the first matrix sharded by columns, each rank's shard of the product.
    y = 0.5
    draw_piece(axes, (one, y, narrow, tall), SAME)
    draw_text(axes, one + narrow / 2, y + tall / 2, "X", fontsize=11)
    draw_text(axes, one + narrow + 0.19, y + tall / 2, "×", fontsize=12)
    draw_bar(axes, (two, y - 0.06, wide, narrow), ranks)
    draw_text(axes, two + wide / 2, y - 0.17, "W₁, by columns", fontsize=SMALL)
    draw_text(axes, one + narrow / 2, y - 0.17, "whole", fontsize=SMALL)
    draw_text(axes, two + wide + 0.14, y + tall / 2, "=", fontsize=12)
    draw_bar(axes, (two + wide + 0.28, y, wide, tall), ranks)
    draw_text(axes, two + 1.5 * wide + 0.28, y - 0.17, "XW₁", fontsize=SMALL)
    x = two + 1.5 * wide + 0.28
    draw_arrow(axes, (x, y + tall + 0.05), (x, y + tall + 0.37), lw=1.2)
    draw_text(axes, x - 0.08, y + tall + 0.2, "GELU, elementwise", ha="right", fontsize=SMALL)
    # GELU(XW₁)W₂: each rank has one partial sum.
    y = 1.95
    draw_bar(axes, (one - 0.42, y, wide, tall), ranks)
    draw_text(axes, one - 0.42 + wide / 2, y - 0.12, "GELU(XW₁)", fontsize=SMALL)
    draw_text(axes, one - 0.42 + wide + 0.17, y + tall / 2, "×", fontsize=12)
    for rank in ranks:
        draw_piece(axes, (1.68, y - 0.3 + rank * wide / N, narrow, wide / N), rank)
    draw_text(axes, 1.68 + narrow / 2, y - 0.42, "W₂, by rows", fontsize=SMALL)
    draw_text(axes, 1.68 + narrow + 0.16, y + tall / 2, "=", fontsize=12)
    for rank in ranks:
        place = 2.66 + 0.09 * rank, y - 0.12 + 0.13 * rank, narrow, tall
        draw_piece(axes, place, rank)
    draw_text(axes, 2.66 + 0.14 + narrow / 2, y - 0.24, "partial sums of Y", fontsize=SMALL)
    # The all-reduce.
    x = 2.66 + 0.14 + narrow / 2
    draw_arrow(axes, (x, y + 0.86), (x, y + 1.2), lw=1.4)
    draw_title(axes, x - 0.1, y + 1.03, "all-reduce", ha="right", fontsize=10)
    y = 3.22
    draw_piece(axes, (x - narrow / 2, y, narrow, tall), SAME)
    draw_text(axes, x, y + tall / 2, "Y", fontsize=11)
    draw_text(axes, x - narrow / 2 - 0.08, y + tall / 2, "whole again, on every rank:", ha="right",
          fontsize=SMALL)  # fmt: skip
    for rank in ranks:
        place = 0.2 + rank * 0.9
        draw_piece(axes, (place, 3.9, 0.16, 0.14), rank)
        draw_text(axes, place + 0.22, 3.97, f"rank {rank}", ha="left", fontsize=SMALL)
    draw_piece(axes, (0.2 + 4 * 0.9, 3.9, 0.16, 0.14), SAME)
    draw_text(axes, 0.2 + 4 * 0.9 + 0.22, 3.97, "all", ha="left", fontsize=SMALL)
    return figure


def zero() -> Figure:
    """Model states in float32 on four ranks, by stages of ZeRO; a coloured shard is held by its
    owner alone, a pale piece by every rank. Stage 0, data parallelism: weights, gradients and
    optimizer states are whole on every rank, 16 bytes for each parameter. Stage 1: each rank has a
    quarter of the optimizer states, 10 bytes. Stage 2: also a quarter of the gradients, 7 bytes.
    Stage 3: also a quarter of the weights, 4 bytes.
    """
    figure, axes = make_canvas(WIDE, 3.55)
    kinds = (("weights", 0.19), ("gradients", 0.19), ("optimizer", 0.38))  # of 4, 4, 8 bytes
    names = ("0: replicas", "1", "2", "3")
    for stage, name in enumerate(names):
        x, y = 0.86 + 1.84 * (stage % 2), 0.14 + 1.78 * (stage // 2)
        draw_title(axes, x, y, f"stage {name}", ha="left", fontsize=10)
        bytes_ = memory.estimate_states(4, Layout(dp=4, zero=stage), "fp32").total // 4
        top = y + 0.4
        for rank in range(N):
            draw_text(axes, x + rank * 0.41 + 0.18, y + 0.25, str(rank), fontsize=SMALL)
        for row, (kind, tall) in enumerate(kinds):
            shared = stage >= 3 - row
            for rank in range(N):
                own = [rank if i == rank else NONE for i in range(N)] if shared else [SAME]
                draw_bar(axes, (x + rank * 0.41, top, 0.36, tall), own)
            if stage % 2 == 0:
                draw_text(axes, x - 0.08, top + tall / 2, kind, ha="right", fontsize=SMALL)
            top += tall + 0.05
        if stage % 2 == 0:
            draw_text(axes, x - 0.08, y + 0.25, "rank", ha="right", fontsize=SMALL)
        text = f"{bytes_} bytes a parameter"
        draw_text(axes, x, top + 0.08, text, ha="left", fontsize=SMALL)
    return figure


def choose() -> Figure:
    """A flow chart with a box for each technique. Each box asks: can the batch be divided, and does
    the fullest rank fit into its memory? Yes: train. No: the next box. After the last: more GPUs,
    or larger ones. The boxes:
    """
    figure, axes = make_canvas(WIDE, 6.86)
    left, wide, high, step, bus = 0.05, 3.5, 0.48, 0.74, 4.02
    draw_text(axes, left, 0.11, "Can the batch be divided?", ha="left", fontsize=10)
    line = "Does the fullest rank fit into its memory?"
    draw_text(axes, left, 0.31, line, ha="left", fontsize=10)
    for number, name in enumerate(strategy.TECHNIQUES):
        y = 0.52 + number * step
        axes.add_patch(Rectangle((left, y), wide, high, fill=False, ec=INK, lw=1.2))
        draw_title(axes, left + 0.1, y + 0.15, f"{number + 1}  {name}", ha="left", fontsize=10)
        draw_text(axes, left + 0.27, y + 0.345, EFFECTS[name], ha="left", fontsize=SMALL)
        draw_arrow(axes, (left + wide, y + high / 2), (bus, y + high / 2), lw=1.1)
        draw_text(axes, left + wide + 0.21, y + high / 2 - 0.11, "yes", fontsize=SMALL)
        draw_arrow(axes, (left + 0.4, y + high), (left + 0.4, y + step), lw=1.1)
        draw_text(axes, left + 0.5, y + (high + step) / 2, "no", ha="left", fontsize=SMALL)
    bottom = 0.52 + len(EFFECTS) * step
    axes.plot([bus, bus], [0.52 + high / 2, bottom - 0.06], color=INK, lw=1.1)
    draw_arrow(axes, (bus, bottom - 0.1), (bus, bottom), lw=1.1)
    for x, size, text in ((left, 2.6, "more GPUs, or larger ones"), (bus - 0.7, 0.98, "train")):
        draw_piece(axes, (x, bottom, size, 0.36), SAME)
        draw_title(axes, x + size / 2, bottom + 0.18, text, fontsize=10)
    return figure


def gpt3() -> Figure:
    """Sixty-four GPUs in eight nodes of eight: two replicas of the model, each split into four
    stages of one node, and every matrix of a stage sharded over the node's eight GPUs. Rank 0 is in
    three groups. Tensor: ranks 0 to 7, its node. Data: ranks 0 and 8, which have the same shard in
    the two replicas. Pipeline: ranks 0, 16, 32 and 48, one in each stage.
    """
    size, step, apart = 0.235, 0.62, 0.17
    figure, axes = make_canvas(WIDE, 3.6)
    left, top = 0.36, 0.62
    across = 8 * size + apart
    for replica in range(2):
        x = left + replica * across
        draw_title(axes, x + 4 * size, 0.16, f"replica {replica}", fontsize=10)
        for stage in range(4):
            y = top + stage * step
            node = f"node {2 * stage + replica}"
            draw_text(axes, x + 8 * size, y - 0.12, node, ha="right", fontsize=SMALL)
            for slot in range(8):
                rank = slot + 8 * (replica + 2 * stage)
                draw_tile(axes, (x + slot * size, y, size, size), slot, str(rank))
    draw_text(axes, 0.02, 0.36, "stage", ha="left", fontsize=SMALL)
    thick = {"fill": False, "ec": INK, "lw": 2.4, "zorder": 4}
    axes.add_patch(Rectangle((left, top), 8 * size, size, **thick))
    pipe = left + size / 2
    for stage in range(4):
        y = top + stage * step
        draw_title(axes, 0.16, y + size / 2, str(stage), fontsize=10)
        axes.add_patch(Rectangle((left, y), size, size, **thick))
        if stage:
            draw_arrow(axes, (pipe, y - step + size), (pipe, y), lw=1.6, zorder=5)
    other = left + across
    axes.add_patch(Rectangle((other, top), size, size, **thick))
    level = top - 0.27
    ends = [(pipe, top), (pipe, level), (other + size / 2, level), (other + size / 2, top)]
    axes.plot(*zip(*ends, strict=True), color=INK, lw=1.6, zorder=5)
    groups = {
        "tensor": "0 to 7: the GPUs of a node",
        "data": "0 and 8: the same shard, in both replicas",
        "pipeline": "0, 16, 32, 48: a node for each stage",
    }
    for row, (name, text) in enumerate(groups.items()):
        y = top + 3 * step + size + 0.21 + row * 0.22
        draw_title(axes, left, y, name, ha="left", fontsize=10)
        draw_text(axes, left + 0.72, y, text, ha="left", fontsize=SMALL)
    return figure


def draw_gpu(axes: Axes, x: float, y: float, place: int, layers: range | None) -> None:
    """Draw one GPU: its share of the batch above its share of four layers; None: all layers."""
    size, tall = 0.44, 0.125
    draw_piece(axes, (x + 0.13, y, 0.18, tall), SAME if layers else place)
    for layer in range(4):
        here = [place if layers and i == place and layer in layers else NONE for i in range(4)]
        draw_bar(axes, (x, y + 0.2 + layer * (tall + 0.02), size, tall), here if layers else [SAME])


def stacks() -> Figure:
    """Two jobs on four nodes of four GPUs. A large model: two replicas, each with half of the
    batch. A replica is a pipeline of two nodes, with layers 1 and 2 on the first and 3 and 4 on the
    second; inside a node each GPU has a quarter of every matrix. A small model and much data: every
    GPU has all layers, and a sixteenth of the batch for itself.
    """
    figure, axes = make_canvas(WIDE, 6.1)
    node, apart = 4 * 0.44 + 3 * 0.06, 0.34
    jobs = (
        ("a large model: replicas, stages, shards", "replica {}, layers {} and {}"),
        ("a small model, much data: replicas only", "node {}: four replicas"),
    )
    for job, (name, label) in enumerate(jobs):
        begin = 0.14 + job * 2.86
        draw_title(axes, 0.04, begin, name, ha="left", fontsize=11)
        for row in range(2):
            y = begin + 0.22 + row * 1.22
            for half in range(2):
                x = 0.1 + half * (node + apart)
                frame = Rectangle((x - 0.06, y), node + 0.12, 1.1, fill=False, ec=INK, lw=0.8)
                axes.add_patch(frame)
                numbers = (2 * row + half,) if job else (row, 2 * half + 1, 2 * half + 2)
                draw_text(axes, x, y + 0.13, label.format(*numbers), ha="left", fontsize=SMALL)
                for place in range(4):
                    layers = None if job else range(2 * half, 2 * half + 2)
                    draw_gpu(axes, x + place * 0.5, y + 0.28, place, layers)
            if not job:
                middle = y + 0.75
                draw_arrow(axes, (0.18 + node, middle), (0.02 + node + apart, middle))
    line = "each GPU: its part of the batch, above its part of\n"
    line += "four layers; pale: the same on all GPUs of the node"
    draw_text(axes, 0.04, 5.86, line, ha="left", fontsize=SMALL)
    return figure


def draw_slab(axes: Axes, place: Corner, depth: Point, color: str) -> None:
    """Draw a cuboid: its front at `place`, its back shifted by `depth` (right, up)."""
    left, top, wide, high = place
    dx, dy = depth
    front = [(left, top), (left + wide, top), (left + wide, top + high), (left, top + high)]
    roof = [front[0], front[1], (left + wide + dx, top - dy), (left + dx, top - dy)]
    side = [front[1], front[2], (left + wide + dx, top + high - dy), roof[2]]
    for corners in (roof, side, front):
        axes.add_patch(Polygon(corners, fc=color, ec=INK, lw=0.8, joinstyle="round"))


def draw_block(axes: Axes, x: float, y: float, along: str) -> None:
    """Draw activations of sequences (depth), tokens (across), width (down), over four ranks."""
    wide, high, dx, dy = 1.0, 0.62, 0.42, 0.34
    for rank in range(N):
        if along == "sequences":  # from the back to the front
            back = (N - 1 - rank) / N
            corner = (x + back * dx, y - back * dy, wide, high)
            draw_slab(axes, corner, (dx / N, dy / N), COLORS[N - 1 - rank])
        elif along == "tokens":
            draw_slab(axes, (x + rank * wide / N, y, wide / N, high), (dx, dy), COLORS[rank])
        else:
            low = (N - 1 - rank) * high / N
            draw_slab(axes, (x, y + low, wide, high / N), (dx, dy), COLORS[N - 1 - rank])


def cuts() -> Figure:
    """Six things that can be divided over four ranks. Activations are a block of sequences, tokens
    and width: data parallelism divides the sequences of the batch, context parallelism the tokens
    of each sequence, tensor parallelism the width of each layer. A pipeline divides the layers,
    ZeRO the states of every layer, and expert parallelism the experts, to which a router sends each
    token.
    """
    figure, axes = make_canvas(WIDE, 5.1)
    panels = {"sequences": "data", "tokens": "context", "width": "tensor"}
    panels |= {"layers": "pipeline", "states": "ZeRO", "experts": "experts"}
    for number, (what, name) in enumerate(panels.items()):
        x, y = 0.42 + 2.2 * (number % 2), 0.14 + 1.72 * (number // 2)
        draw_title(axes, x - 0.36, y, name, ha="left", fontsize=11)
        draw_text(axes, x + 1.5, y, f"divides {what}", ha="right", fontsize=SMALL)
        if number < 3:
            draw_block(axes, x, y + 0.62, what)
            draw_text(axes, x - 0.1, y + 0.93, "width", ha="center", fontsize=SMALL, rotation=90)
            draw_text(axes, x + 0.5, y + 1.36, "tokens", fontsize=SMALL)
            draw_text(axes, x + 1.27, y + 1.19, "sequences", fontsize=SMALL, rotation=39)
        elif what == "layers":
            for rank in range(N):
                top = y + 0.22 + rank * 0.31
                draw_tile(axes, (x, top, 1.2, 0.21), rank, f"layer {rank + 1}")
                if rank < N - 1:
                    draw_arrow(axes, (x + 0.6, top + 0.21), (x + 0.6, top + 0.31), mutation_scale=7)
        elif what == "states":
            for row, kind in enumerate(("weights", "gradients", "moments")):
                draw_text(axes, x + 0.26, y + 0.42 + row * 0.38, kind, ha="right", fontsize=SMALL)
                draw_bar(axes, (x + 0.32, y + 0.28 + row * 0.38, 1.14, 0.28), list(range(N)))
        else:
            for i, expert in enumerate((1, 3, 0, 2)):
                token = x + 0.02 + i * 0.38
                draw_piece(axes, (token + 0.07, y + 0.3, 0.16, 0.16), SAME)
                draw_tile(axes, (token, y + 1.06, 0.3, 0.3), i, str(i))
                ends = (token + 0.15, y + 0.46), (x + 0.17 + expert * 0.38, y + 1.06)
                draw_arrow(axes, *ends, lw=1.1, mutation_scale=9)
            draw_text(axes, x - 0.04, y + 0.38, "tokens", ha="right", fontsize=SMALL)
            draw_text(axes, x - 0.04, y + 1.21, "experts", ha="right", fontsize=SMALL)
    return figure


def main() -> None:
    for draw in (step, ways, bubble, ffn, zero, choose, gpt3, stacks, cuts):
        alt = " ".join(draw.__doc__.split())
        if draw is choose:
            boxes = (f"{i}, {n}: {EFFECTS[n]}" for i, n in enumerate(strategy.TECHNIQUES, 1))
            alt = f"{alt} {'; '.join(boxes)}."
        show.save_svg(draw(), HERE / f"model_parallelism_{draw.__name__}.svg", alt)


if __name__ == "__main__":
    main()
