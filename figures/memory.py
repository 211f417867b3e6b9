"""Draw the pictures of the lesson `memory` (python figures/memory.py).

Pictures of what the lesson measures itself are drawn by `shardlab.common.show.plots`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Polygon, Rectangle

from shardlab import memory
from shardlab.common import show
from shardlab.common.show.drawing import (
    draw_arrow,
    draw_box,
    draw_title,
    make_canvas,
    pick_text_color,
)
from shardlab.gpt.model import PRESETS
from shardlab.layout import Layout

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS
# These colours stand for kinds of memory, not for ranks, so they are not the first four.
WEIGHTS, GRADIENTS, MOMENTS, ACTIVATIONS = COLORS[4:8]


def draw_life() -> None:
    """Draw a schematic of the bytes held over a step. Heights are not to scale."""
    figure, axes = make_canvas(4.4, 4.3)
    left, right = 0.98, 4.35
    phases = {"forward": (left, 2.0), "backward": (2.0, 3.4), "step": (3.4, 3.92)}
    top, tall, gap = 0.55, 0.52, 0.2
    for name, (start, stop) in phases.items():
        draw_title(axes, (start + stop) / 2, 0.2, name)
        axes.plot([stop, stop], [0.38, 4.1], color=INK, lw=0.6, alpha=0.5)
    loss, begin, step, end = 2.0, 2.0, 3.4, 3.92
    rows = [
        ("weights", WEIGHTS, [(left, 0), (left, 1), (right, 1), (right, 0)]),
        ("moments", MOMENTS, [(left, 0), (left, 1), (right, 1), (right, 0)]),
        ("gradients", GRADIENTS, [(begin, 0), (step, 1), (end, 1), (end, 0)]),
        ("activations", ACTIVATIONS, [(left, 0), (loss, 1), (step, 0)]),
        (
            "temporary",
            INK,
            [(loss - 0.12, 0), (loss - 0.12, 0.45), (loss, 0.45), (loss, 1), (loss + 0.15, 1)]
            + [(loss + 0.15, 0.15), (step, 0.15), (step, 0.3), (end, 0.3), (end, 0)],
        ),
    ]
    for i, (name, color, shape) in enumerate(rows):
        floor = top + i * (tall + gap) + tall
        axes.text(left - 0.12, floor - tall / 2, name, ha="right", va="center")
        points = [(x, floor - tall * y) for x, y in shape]
        axes.add_patch(Polygon(points, closed=True, fc=color, lw=0, alpha=1 - 0.5 * (color == INK)))
        axes.plot([left, right], [floor, floor], color=INK, lw=0.6, alpha=0.5)
    axes.text(3.97, top + 2 * (tall + gap) + tall / 2, "zero\n_grad", fontsize=9.2, va="center")
    axes.text(
        2.24, top + 4 * (tall + gap) + 0.12, "the logits’ gradient", fontsize=9.2, va="center"
    )
    draw_arrow(axes, (loss + 0.07, 4.26), (loss + 0.07, 4.1 - 0.08))
    axes.text(loss + 0.22, 4.2, "the peak is here", va="center", fontsize=10, fontweight="bold")
    show.save_svg(
        figure,
        HERE / "memory_life.svg",
        "Tensors held during a training step. Weights and the optimizer's moments are held all "
        "the time. Activations grow through forward and shrink through backward. Gradients grow "
        "through backward and stay until zero_grad. Temporary tensors are largest where backward "
        "begins, at the logits: this is the peak.",
    )


RECIPES = [
    ("float32", "fp32", "adamw"),
    ("bfloat16, float32 master", "bf16", "adamw"),
    ("… and float32 gradients", "bf16-fp32-gradients", "adamw"),
    ("8-bit moments", "8-bit", "adamw"),
    ("bfloat16, momentum", "bf16", "momentum"),
    ("bfloat16, SGD", "bf16", "sgd"),
]


def draw_recipes() -> None:
    figure, axes = make_canvas(4.6, 3.6)
    left, unit, tall = 1.8, 0.13, 0.36
    parts = (("weights", WEIGHTS), ("gradients", GRADIENTS), ("optimizer", MOMENTS))
    x = 0.55
    for name, color in parts:
        axes.add_patch(Rectangle((x, 0.1), 0.2, 0.2, fc=color, lw=0))
        axes.text(x + 0.27, 0.2, name, va="center", fontsize=10)
        x += 1.07
    for i, (words, precision, optimizer) in enumerate(RECIPES):
        y = 0.48 + i * 0.5
        n = 10**9
        states = memory.estimate_states(n, precision=precision, optimizer=optimizer)
        axes.text(left - 0.12, y + tall / 2, words, ha="right", va="center", fontsize=10)
        x = left
        sizes = states.parameters, states.gradients, states.optimizer
        for size, (_, color) in zip(sizes, parts, strict=True):
            wide = unit * size / n
            axes.add_patch(Rectangle((x, y), wide, tall, fc=color, ec=INK, lw=0.6))
            if wide > 0.25:
                style = {"ha": "center", "va": "center", "color": pick_text_color(color)}
                axes.text(x + wide / 2, y + tall / 2, f"{round(size / n, 1):g}", **style)
            x += wide
        total = f"{round(states.total / n, 1):g}"
        axes.text(x + 0.1, y + tall / 2, total, va="center", fontweight="bold")
    said = [
        f"{words}: {memory.estimate_states(10**9, precision=p, optimizer=o).total / 1e9:.0f}"
        for words, p, o in RECIPES
    ]
    alt = "Bytes of states for each parameter, as bars of weights, gradients and optimizer. "
    show.save_svg(figure, HERE / "memory_recipes.svg", f"{alt}{'; '.join(said)} bytes.")


def find_crossing(name: str, seq: int, attention: str, recompute: str) -> float:
    """Return the number of sequences at which activations are as large as model states."""
    config = PRESETS[name]
    states = memory.estimate_states(memory.count_parameters(config)).total
    two = [
        memory.estimate_activations(
            config,
            Layout(micro_batch=b, recompute=recompute),
            seq,
            attention=attention,
            device="gpu",
        ).total
        for b in (1, 2)
    ]
    each = two[1] - two[0]  # every further sequence adds the same number of bytes
    return 1 + (states - two[0]) / each


def draw_overtake() -> None:
    show.set_style()
    figure, axes = plt.subplots(figsize=(4.8, 4.1))
    lengths = np.array([2**k for k in range(9, 18)])
    axes.set_xlim(lengths[0], lengths[-1])
    axes.set_ylim(0.25, 512)
    axes.loglog()
    cases = [
        ("plain attention", ("plain", "none"), COLORS[5], (1, 2), -9),
        ("fused attention", ("fused", "none"), COLORS[2], (3, 5), 9),
        ("every layer recomputed", ("fused", "full"), COLORS[0], (3, 6), 9),
    ]
    for words, how, color, (begin, end), above in cases:
        batch = np.array([find_crossing("llama-3-8b", int(s), *how) for s in lengths])
        axes.plot(lengths, batch, color=color, lw=2.2)
        ends = axes.transData.transform([(lengths[i], batch[i]) for i in (begin, end)])
        angle = float(np.degrees(np.arctan2(*(ends[1] - ends[0])[::-1])))
        place = np.sqrt(lengths[begin] * lengths[end]), np.sqrt(batch[begin] * batch[end])
        off = above * np.sin(np.radians(-angle)), above * np.cos(np.radians(angle))
        look = {"textcoords": "offset points", "rotation": angle, "rotation_mode": "anchor"}
        axes.annotate(words, place, off, ha="center", va="center", fontsize=10, **look)
    axes.set_xticks([512, 2048, 8192, 32_768, 131_072])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_yticks([1, 4, 16, 64, 256])
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("sequences on the GPU")
    axes.text(0.97, 0.93, "activations larger", ha="right", transform=axes.transAxes)
    axes.text(0.03, 0.06, "states larger", transform=axes.transAxes)
    show.save_svg(
        figure,
        HERE / "memory_overtake.svg",
        "Llama 3 8B: the number of sequences, for each sequence length, at which activations "
        "become larger than the states. With fused attention only the product of both numbers "
        "counts; with plain attention the line falls more steeply; recomputing every layer moves "
        "the line up.",
    )


def draw_recompute() -> None:
    figure, axes = make_canvas(4.4, 4.8)
    passes = ("F1 F2 F3 F4 B4 B3 B2 B1", "F1 F2 F3 F4 F4 B4 F3 B3 F2 B2 F1 B1")
    for panel, (words, text) in enumerate(zip(("keep all", "recompute"), passes, strict=True)):
        order, left, unit, y = text.split(), 0.66, 0.305, 0.14 + 2.45 * panel
        draw_title(axes, 0.04, y, words, ha="left")
        for moment, name in enumerate(order):
            color = "none" if name[0] == "B" else ACTIVATIONS
            draw_box(axes, left + moment * unit, y + 0.2, unit, 0.26, name, color)
        for layer in range(1, 5):
            foot = y + 0.6 + 0.38 * layer
            runs = [i for i, name in enumerate(order) if name == f"F{layer}"]
            end = order.index(f"B{layer}") + 1
            spans = [(runs[0], end, 0.07)]  # input, and inner activations
            spans += [(runs[-1], end, 0.28)] + [(i, i + 1, 0.28) for i in runs[:-1]]
            for begin, stop, high in spans:
                place = (left + begin * unit, foot - high)
                axes.add_patch(Rectangle(place, (stop - begin) * unit, high, fc=ACTIVATIONS, lw=0))
            axes.text(left - 0.08, foot - 0.12, f"layer {layer}", ha="right", va="center")
    show.save_svg(
        figure,
        HERE / "memory_recompute.svg",
        "Activations of four layers over time, twice. Keep all: each layer's activations stay "
        "from its forward to its backward; at the end of forward those of all four exist. "
        "Recompute: each layer keeps only its input, and runs forward again right before its "
        "backward; only one layer's activations are complete at any time.",
    )


def main() -> None:
    draw_recompute()
    draw_life()
    draw_recipes()
    draw_overtake()


if __name__ == "__main__":
    main()
