"""Draw the pictures of lesson `model_parallelism`: python figures/model_parallelism.py

What is the same on every rank is pale; what one rank alone holds has that rank's colour. All of
them are narrow, so that a phone shows them whole. The docstring of a function that draws is the
picture's alternative text.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from shardlab import show, strategy
from shardlab.show.drawing import Point, arrow, canvas, on, title, words

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
SMALL = 9.2  # points: 9 pixels on a phone, where these pictures are 328 pixels wide
WIDE = 4.4  # inches
N = 4
SAME, NONE = -1, -2  # instead of a rank: the same on every rank; not here
RUNGS = {  # what each rung of the strategy's chart does
    "data parallel": "every GPU has a copy of everything",
    "ZeRO-1": "each optimizer state once among the copies",
    "ZeRO-2": "each gradient once, too",
    "ZeRO-3": "each weight once, too, if the wire keeps up",
    "recompute": "layers keep their inputs alone; ZeRO as before",
    "tensor in the node": "matrices cut, over 2, 4, … GPUs of a node",
    "pipeline across nodes": "layers cut, over as few nodes as will do",
}
Corner = tuple[float, float, float, float]  # left, top, width, height: inches


def piece(axes: Axes, place: Corner, rank: int) -> None:
    """A piece of something, held by `rank`."""
    left, top, wide, high = place
    look = {"fc": INK, "alpha": 0.16} if rank == SAME else {"fc": COLORS[rank]}
    axes.add_patch(Rectangle((left, top), wide, high, lw=0, **look))
    axes.add_patch(Rectangle((left, top), wide, high, fill=False, ec=INK, lw=0.7))


def bar(axes: Axes, place: Corner, holders: list[int]) -> None:
    """A row of pieces, side by side, each with its holder; a broken outline where some lack."""
    left, top, wide, high = place
    each = wide / len(holders)
    if NONE in holders:
        faint = {"fill": False, "ec": INK, "ls": (0, (2, 2)), "lw": 0.6, "alpha": 0.6}
        axes.add_patch(Rectangle((left, top), wide, high, **faint))
    for i, rank in enumerate(holders):
        if rank != NONE:
            piece(axes, (left + i * each, top, each, high), rank)


def tile(axes: Axes, place: Corner, rank: int, text: str) -> None:
    """A piece of `rank` with words in it."""
    left, top, wide, high = place
    piece(axes, place, rank)
    color = on(COLORS[rank])
    words(axes, left + wide / 2, top + high / 2, text, color=color, fontsize=SMALL)


def ways() -> Figure:
    """Four ways to train one model of four layers on four ranks. Data parallelism: each rank has a
    quarter of the batch and all four layers; gradients are sent. ZeRO, stage 3: each rank has a
    quarter of the batch, and of every layer's weights, gradients and optimizer states a quarter;
    weights and gradients are sent. Pipeline: each rank has one layer, and the whole batch passes
    through all of them; activations are sent to the next rank. Tensor parallelism: each rank has
    the whole batch and a quarter of every layer's matrices; activations are summed in every layer.
    """
    figure, axes = canvas(WIDE, 5.0)
    size, between, high = 0.4, 0.06, 0.19
    panels = (
        ("data parallelism", "gradients,\nonce in a step"),
        ("ZeRO, stage 3", "weights and gradients,\nof every layer"),
        ("pipeline", "activations,\nto the next stage"),
        ("tensor parallelism", "activations,\nsummed in every layer"),
    )
    for number, (name, sent) in enumerate(panels):
        x, y = 0.55 + 2.03 * (number % 2), 0.14 + 2.52 * (number // 2)
        title(axes, x, y, name, ha="left", fontsize=11)
        for row, text in ((0.3, "rank"), (0.57, "batch"), (1.25, "layers"), (2.02, "sends")):
            if number % 2 == 0:
                words(axes, x - 0.08, y + row, text, ha="right", fontsize=SMALL)
        for rank in range(N):
            left = x + rank * (size + between)
            words(axes, left + size / 2, y + 0.3, str(rank), fontsize=SMALL)
            own = [rank if i == rank else NONE for i in range(N)]
            bar(axes, (left, y + 0.49, size, 0.17), own if number < 2 else [SAME])
            for layer in range(N):
                top = y + 0.85 + layer * (high + 0.03)
                holders = ([SAME], own, [rank if layer == rank else NONE], own)[number]
                bar(axes, (left, top, size, high), holders)
        words(axes, x, y + 2.02, sent, ha="left", fontsize=SMALL)
    return figure


def choose() -> Figure:
    """A flow chart with a rung for each technique. At every rung two questions: can the batch be
    shared out, and does the fullest rank fit into nine tenths of its memory? Yes: train. No: the
    next rung. After the last one: more GPUs, or larger ones. The rungs:
    """
    figure, axes = canvas(WIDE, 6.55)
    left, wide, high, step, bus = 0.05, 3.5, 0.48, 0.74, 4.02
    words(axes, left, 0.11, "Can the batch be shared out?", ha="left", fontsize=10)
    line = "Does the fullest rank fit into 90 % of its memory?"
    words(axes, left, 0.31, line, ha="left", fontsize=10)
    for number, name in enumerate(strategy.RUNGS):
        y = 0.52 + number * step
        axes.add_patch(Rectangle((left, y), wide, high, fill=False, ec=INK, lw=1.2))
        title(axes, left + 0.1, y + 0.15, f"{number + 1}  {name}", ha="left", fontsize=10)
        words(axes, left + 0.27, y + 0.345, RUNGS[name], ha="left", fontsize=SMALL)
        arrow(axes, (left + wide, y + high / 2), (bus, y + high / 2), lw=1.1)
        words(axes, left + wide + 0.21, y + high / 2 - 0.11, "yes", fontsize=SMALL)
        arrow(axes, (left + 0.4, y + high), (left + 0.4, y + step), lw=1.1)
        words(axes, left + 0.5, y + (high + step) / 2, "no", ha="left", fontsize=SMALL)
    bottom = 0.52 + len(RUNGS) * step
    axes.plot([bus, bus], [0.52 + high / 2, bottom - 0.06], color=INK, lw=1.1)
    arrow(axes, (bus, bottom - 0.1), (bus, bottom), lw=1.1)
    for x, size, text in ((left, 2.6, "more GPUs, or larger ones"), (bus - 0.7, 0.98, "train")):
        piece(axes, (x, bottom, size, 0.36), SAME)
        title(axes, x + size / 2, bottom + 0.18, text, fontsize=10)
    return figure


def gpt3() -> Figure:
    """Sixty-four GPUs in eight nodes of eight: two copies of the model, each cut into four stages
    of one node, and every matrix of a stage cut over the node's eight GPUs. Rank 0 is in three
    groups. Tensor: ranks 0 to 7, its node. Data: ranks 0 and 8, which have the same part in the
    two copies. Pipeline: ranks 0, 16, 32 and 48, one in each stage.
    """
    size, step, apart = 0.235, 0.62, 0.17
    figure, axes = canvas(WIDE, 3.6)
    left, top = 0.36, 0.62
    across = 8 * size + apart
    for copy in range(2):
        x = left + copy * across
        title(axes, x + 4 * size, 0.16, f"copy {copy} of the model", fontsize=10)
        for stage in range(4):
            y = top + stage * step
            node = f"node {2 * stage + copy}"
            words(axes, x + 8 * size, y - 0.12, node, ha="right", fontsize=SMALL)
            for slot in range(8):
                rank = slot + 8 * (copy + 2 * stage)
                tile(axes, (x + slot * size, y, size, size), slot, str(rank))
    words(axes, 0.02, 0.36, "stage", ha="left", fontsize=SMALL)
    thick = {"fill": False, "ec": INK, "lw": 2.4, "zorder": 4}
    axes.add_patch(Rectangle((left, top), 8 * size, size, **thick))
    pipe = left + size / 2
    for stage in range(4):
        y = top + stage * step
        title(axes, 0.16, y + size / 2, str(stage), fontsize=10)
        axes.add_patch(Rectangle((left, y), size, size, **thick))
        if stage:
            arrow(axes, (pipe, y - step + size), (pipe, y), lw=1.6, zorder=5)
    other = left + across
    axes.add_patch(Rectangle((other, top), size, size, **thick))
    level = top - 0.27
    ends = [(pipe, top), (pipe, level), (other + size / 2, level), (other + size / 2, top)]
    axes.plot(*zip(*ends, strict=True), color=INK, lw=1.6, zorder=5)
    groups = {
        "tensor": "0 to 7: the GPUs of a node",
        "data": "0 and 8: the same part, in both copies",
        "pipeline": "0, 16, 32, 48: a node for each stage",
    }
    for row, (name, text) in enumerate(groups.items()):
        y = top + 3 * step + size + 0.21 + row * 0.22
        title(axes, left, y, name, ha="left", fontsize=10)
        words(axes, left + 0.72, y, text, ha="left", fontsize=SMALL)
    return figure


def gpu(axes: Axes, x: float, y: float, place: int, layers: range | None) -> None:
    """One GPU: its share of the batch above what it holds of four layers; None: copies of all."""
    size, tall = 0.44, 0.125
    piece(axes, (x + 0.13, y, 0.18, tall), SAME if layers else place)
    for layer in range(4):
        here = [place if layers and i == place and layer in layers else NONE for i in range(4)]
        bar(axes, (x, y + 0.2 + layer * (tall + 0.02), size, tall), here if layers else [SAME])


def stacks() -> Figure:
    """Two jobs on four nodes of four GPUs. A large model: there are two copies, and each gets half
    of the batch. A copy is a pipeline of two nodes, with layers 1 and 2 on the first and 3 and 4 on
    the second; inside a node each GPU has a quarter of every matrix. A small model and much data:
    every GPU has all layers, and a sixteenth of the batch for itself.
    """
    figure, axes = canvas(WIDE, 6.1)
    node, apart = 4 * 0.44 + 3 * 0.06, 0.34
    jobs = (
        ("a large model: copies, of stages, of slices", "copy {}, layers {} and {}"),
        ("a small model, much data: copies alone", "node {}: four copies"),
    )
    for job, (name, label) in enumerate(jobs):
        begin = 0.14 + job * 2.86
        title(axes, 0.04, begin, name, ha="left", fontsize=11)
        for row in range(2):
            y = begin + 0.22 + row * 1.22
            for half in range(2):
                x = 0.1 + half * (node + apart)
                frame = Rectangle((x - 0.06, y), node + 0.12, 1.1, fill=False, ec=INK, lw=0.8)
                axes.add_patch(frame)
                numbers = (2 * row + half,) if job else (row, 2 * half + 1, 2 * half + 2)
                words(axes, x, y + 0.13, label.format(*numbers), ha="left", fontsize=SMALL)
                for place in range(4):
                    layers = None if job else range(2 * half, 2 * half + 2)
                    gpu(axes, x + place * 0.5, y + 0.28, place, layers)
            if not job:
                middle = y + 0.75
                arrow(axes, (0.18 + node, middle), (0.02 + node + apart, middle))
    line = (
        "each GPU: its part of the batch, and below it\nwhat it holds of four layers; pale: a copy"
    )
    words(axes, 0.04, 5.86, line, ha="left", fontsize=SMALL)
    return figure


def slab(axes: Axes, place: Corner, depth: Point, color: str) -> None:
    """A cuboid: its front at `place`, its back shifted by `depth` (right, up)."""
    left, top, wide, high = place
    dx, dy = depth
    front = [(left, top), (left + wide, top), (left + wide, top + high), (left, top + high)]
    roof = [front[0], front[1], (left + wide + dx, top - dy), (left + dx, top - dy)]
    side = [front[1], front[2], (left + wide + dx, top + high - dy), roof[2]]
    for corners in (roof, side, front):
        axes.add_patch(Polygon(corners, fc=color, ec=INK, lw=0.8, joinstyle="round"))


def block(axes: Axes, x: float, y: float, along: str) -> None:
    """Activations of sequences (depth), tokens (across) and width (down), cut over four ranks."""
    wide, high, dx, dy = 1.0, 0.62, 0.42, 0.34
    for rank in range(N):
        if along == "sequences":  # from the back to the front
            back = (N - 1 - rank) / N
            corner = (x + back * dx, y - back * dy, wide, high)
            slab(axes, corner, (dx / N, dy / N), COLORS[N - 1 - rank])
        elif along == "tokens":
            slab(axes, (x + rank * wide / N, y, wide / N, high), (dx, dy), COLORS[rank])
        else:
            low = (N - 1 - rank) * high / N
            slab(axes, (x, y + low, wide, high / N), (dx, dy), COLORS[N - 1 - rank])


def cuts() -> Figure:
    """Six things that four ranks can share. Activations are a block of sequences, tokens and width:
    data parallelism cuts the sequences of the batch, context parallelism the tokens of each
    sequence, tensor parallelism the width of each layer. Of the model, a pipeline cuts the layers,
    ZeRO the states of every layer, and expert parallelism deals out the experts, to which each
    token is sent by a router.
    """
    figure, axes = canvas(WIDE, 5.1)
    panels = {"sequences": "data", "tokens": "context", "width": "tensor"}
    panels |= {"layers": "pipeline", "states": "ZeRO", "experts": "experts"}
    for number, (what, name) in enumerate(panels.items()):
        x, y = 0.42 + 2.2 * (number % 2), 0.14 + 1.72 * (number // 2)
        title(axes, x - 0.36, y, name, ha="left", fontsize=11)
        words(axes, x + 1.5, y, f"cuts {what}", ha="right", fontsize=SMALL)
        if number < 3:
            block(axes, x, y + 0.62, what)
            words(axes, x - 0.1, y + 0.93, "width", ha="center", fontsize=SMALL, rotation=90)
            words(axes, x + 0.5, y + 1.36, "tokens", fontsize=SMALL)
            words(axes, x + 1.27, y + 1.19, "sequences", fontsize=SMALL, rotation=39)
        elif what == "layers":
            for rank in range(N):
                top = y + 0.22 + rank * 0.31
                tile(axes, (x, top, 1.2, 0.21), rank, f"layer {rank + 1}")
                if rank < N - 1:
                    arrow(axes, (x + 0.6, top + 0.21), (x + 0.6, top + 0.31), mutation_scale=7)
        elif what == "states":
            for row, kind in enumerate(("weights", "gradients", "moments")):
                words(axes, x + 0.26, y + 0.42 + row * 0.38, kind, ha="right", fontsize=SMALL)
                bar(axes, (x + 0.32, y + 0.28 + row * 0.38, 1.14, 0.28), list(range(N)))
        else:
            for i, expert in enumerate((1, 3, 0, 2)):
                token = x + 0.02 + i * 0.38
                piece(axes, (token + 0.07, y + 0.3, 0.16, 0.16), SAME)
                tile(axes, (token, y + 1.06, 0.3, 0.3), i, str(i))
                ends = (token + 0.15, y + 0.46), (x + 0.17 + expert * 0.38, y + 1.06)
                arrow(axes, *ends, lw=1.1, mutation_scale=9)
            words(axes, x - 0.04, y + 0.38, "tokens", ha="right", fontsize=SMALL)
            words(axes, x - 0.04, y + 1.21, "experts", ha="right", fontsize=SMALL)
    return figure


def main() -> None:
    for draw in (ways, choose, gpt3, stacks, cuts):
        alt = " ".join(draw.__doc__.split())
        if draw is choose:
            rungs = (f"{i}, {name}: {RUNGS[name]}" for i, name in enumerate(strategy.RUNGS, 1))
            alt = f"{alt} {'; '.join(rungs)}."
        show.svg(draw(), HERE / f"model_parallelism_{draw.__name__}.svg", alt)


if __name__ == "__main__":
    main()
