"""Draw the pictures of the lesson `pipeline` (python figures/pipeline.py).

Timelines are simulated, and drawn like measured ones in the lesson: see shardlab.pipeline.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from shardlab import pipeline
from shardlab.common import show
from shardlab.common.show.drawing import Point, draw_arrow, draw_title, make_canvas, pick_text_color
from shardlab.pipeline.timeline_figure import KIND_COLORS, draw_timelines

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS  # of the stages, which are ranks
SMALL = 9  # points; other text has 10 or 11
Corner = tuple[float, float, float, float]  # left, top, width, height: inches


def draw_tile(axes: Axes, place: Corner, color: str, words: str, **look: object) -> None:
    """Draw a filled box with a text in it."""
    left, top, wide, high = place
    axes.add_patch(Rectangle((left, top), wide, high, fc=color, ec=INK, lw=0.8))
    middle = left + wide / 2, top + high / 2
    axes.text(
        *middle,
        words,
        color=pick_text_color(color),
        ha="center",
        va="center",
        **{"fontsize": 10, **look},
    )


def draw_cut() -> None:
    figure, axes = make_canvas(6.3, 3.0)
    wide, gap, left = 1.2, 0.46, 0.06
    held = (("emb", "1", "2"), ("3", "4"), ("5", "6"), ("7", "8", "norm\nhead"))
    tops = {"weights": 1.22, "gradients": 1.5, "optimizer": 1.78}
    for rank, layers in enumerate(held):
        x = left + rank * (wide + gap)
        axes.text(x + wide / 2, 0.18, f"rank {rank}", ha="center", va="center", weight="bold")
        for i, layer in enumerate(layers):
            each = wide / len(layers)
            draw_tile(axes, (x + i * each, 0.38, each, 0.5), COLORS[rank], layer, fontsize=SMALL)
        for words, top in tops.items():
            draw_tile(axes, (x, top, wide, 0.28), COLORS[rank], words, fontsize=SMALL)
        if rank:
            draw_arrow(axes, (x - gap + 0.06, 0.52), (x - 0.06, 0.52))
            draw_arrow(axes, (x - 0.06, 0.74), (x - gap + 0.06, 0.74))
    axes.text(left, 1.1, "holds, of its own layers only:", va="center", fontsize=SMALL)
    right = left + 4 * wide + 3 * gap
    for y, words, ends in (
        (2.42, "forward: activations", (left, right)),
        (2.82, "backward: their gradients", (right, left)),
    ):
        draw_arrow(axes, (ends[0], y), (ends[1], y), lw=1)
        axes.text((left + right) / 2, y - 0.13, words, ha="center", va="center", fontsize=SMALL)
    show.save_svg(
        figure,
        HERE / "pipeline_cut.svg",
        "A model of an embedding, eight blocks, a LayerNorm and a head, split into four stages, "
        "one for each rank: rank 0 has the embedding and blocks 1 and 2, rank 1 blocks 3 and 4, "
        "rank 2 blocks 5 and 6, rank 3 blocks 7 and 8, the LayerNorm and the head. Each rank "
        "holds weights, gradients and optimizer states of its own stage alone. Activations pass "
        "from each rank to the next, and their gradients come back.",
    )


def draw_placement() -> None:
    size, gap, between, left = 0.34, 0.15, 0.36, 0.55
    step = size + gap
    figure, axes = make_canvas(6.75, 1.85)
    panels = (
        ("one chunk each", [[0, 1, 2, 3]]),
        ("a loop, two chunks", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("a V, two chunks", [[0, 1, 2, 3], [7, 6, 5, 4]]),
    )
    for number, (words, chunks) in enumerate(panels):
        x = left + number * (3 * step + size + between)
        draw_title(axes, x, 0.15, words, ha="left", fontsize=10)
        top = 0.6
        for stage in range(4):
            middle = x + stage * step + size / 2
            axes.text(middle, top - 0.14, str(stage), ha="center", va="center", fontsize=SMALL)
            for chunk, parts in enumerate(chunks):
                place = (x + stage * step, top + chunk * 0.72, size, size)
                draw_tile(axes, place, COLORS[stage], str(parts[stage]), weight="bold")
        for chunk, parts in enumerate(chunks):
            y = top + chunk * 0.72 + size / 2
            for i in range(3):
                ends = [(x + i * step + size + 0.02, y), (x + (i + 1) * step - 0.02, y)]
                draw_arrow(axes, *(ends if parts[1] > parts[0] else ends[::-1]), lw=1.1)
        if len(chunks) == 2:
            first, last = x + size / 2, x + 3 * step + size / 2
            above, below, half = top + size + 0.02, top + 0.72 - 0.02, top + 0.36 + size / 2
            if chunks[1][0] == 4:
                axes.plot([last, last, first, first], [above, half, half, below - 0.05], color=INK)
                axes.lines[-1].set_linewidth(1.1)
                draw_arrow(axes, (first, half + 0.02), (first, below), lw=1.1)
            else:
                draw_arrow(axes, (last, above), (last, below), lw=1.1)
    axes.text(left - 0.08, 0.46, "stage", ha="right", va="center", fontsize=SMALL)
    show.save_svg(
        figure,
        HERE / "pipeline_placement.svg",
        "Which chunks of a model four stages hold. One each: chunks 0 to 3 in order. A loop of "
        "two each: stage 0 has chunks 0 and 4, stage 1 chunks 1 and 5, and so on; after chunk 3 a "
        "micro-batch goes back to stage 0. A V of two each: stage 0 has chunks 0 and 7, stage 3 "
        "chunks 3 and 4; at the turn the micro-batch stays on its stage, and it ends on the stage "
        "where it began.",
    )


def draw_messages() -> None:
    left, unit, tall, hop = 0.86, 0.62, 0.3, 0.6
    passes = (("F5", 1), ("B2", 2), ("F6", 1), ("B3", 2))
    figure, axes = make_canvas(left + 8.4 * unit + 0.15, 2.85)
    for early in (False, True):
        y = 0.42 + early * 1.3
        words = "posted one pass earlier" if early else "each receive posted when it is needed"
        draw_title(axes, 0.05, y - 0.27, words, ha="left", fontsize=10)
        for row, name in enumerate(("computes", "receives")):
            middle = y + row * (tall + 0.06) + tall / 2
            axes.text(left - 0.1, middle, name, ha="right", va="center", fontsize=10)
        now = 0.0
        upcoming = [*passes[1:], ("F7", 0)] if early else passes
        for (name, long), (wanted, _) in zip(passes, upcoming, strict=True):
            begin = now if early else now + hop
            x = left + now * unit
            place = (x, y + tall + 0.06, hop * unit, tall)
            draw_tile(axes, place, COLORS[7], f"R{wanted}", fontsize=8)
            axes.plot([x], [y + 2 * tall + 0.14], marker="^", color=INK, markersize=4.5)
            if not early:
                idle = Rectangle((x, y), hop * unit, tall, fc="none", ec=INK, lw=0.7, alpha=0.5)
                idle.set_linestyle((0, (2, 2)))
                axes.add_patch(idle)
            draw_tile(axes, (left + begin * unit, y, long * unit, tall), KIND_COLORS[name[0]], name)
            now = begin + long
    axes.plot([left], [2.74], marker="^", color=INK, markersize=4.5)
    axes.text(left + 0.12, 2.74, "a receive is posted", va="center", fontsize=SMALL)
    draw_arrow(axes, (left + 6 * unit, 2.74), (left + 8.4 * unit, 2.74), lw=1)
    axes.text(left + 5.9 * unit, 2.74, "time", ha="right", va="center", fontsize=SMALL)
    show.save_svg(
        figure,
        HERE / "pipeline_messages.svg",
        "A stage that alternates forward and backward, twice. Above, each receive is posted when "
        "its pass is due: the transfer runs while the stage waits. Below, each receive is posted "
        "one pass earlier: the transfer overlaps with that pass, and the stage never waits.",
    )


def get_shade(fraction: float) -> str:
    """Return the colour between paper (0) and full colour (1)."""
    paper, full = (253, 243, 235), tuple(int(COLORS[5][i : i + 2], 16) for i in (1, 3, 5))
    mixed = (round(a + fraction * (b - a)) for a, b in zip(paper, full, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def draw_choose() -> None:
    stages, counts = (2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64, 128)
    left, wide, tall = 0.95, 0.62, 0.28
    figure, axes = make_canvas(left + 8 * wide + 0.1, 4.7)
    draw_title(axes, 0.05, 0.15, "bubble: (p−1) / (m+p−1), in percent", ha="left")
    for row, p in enumerate(stages):
        y = 0.62 + row * tall
        axes.text(left - 0.1, y + tall / 2, f"p = {p}", ha="right", va="center", fontsize=10)
        for column, m in enumerate(counts):
            bubble = (p - 1) / (m + p - 1)
            draw_tile(
                axes,
                (left + column * wide, y, wide, tall),
                get_shade(bubble),
                f"{100 * bubble:.0f}",
            )
    bottom, octave = 4.4, 0.2

    def get_point(column: float, held: float) -> Point:
        return left + (column + 0.5) * wide, bottom - octave * (math.log2(held) + 4)

    words = "peak activations of stage 0 (1: one micro-batch, all layers)"
    draw_title(axes, 0.05, 2.3, words, ha="left")
    for level in ("1/16", "1/4", "1", "4", "16"):
        (x, y), (end, _) = get_point(-0.5, float(Fraction(level))), get_point(7.5, 1)
        axes.text(left - 0.1, y, level, ha="right", va="center", fontsize=10)
        axes.plot([x, end], [y, y], color=INK, lw=0.6, alpha=0.3)
    for p, color in ((4, COLORS[0]), (16, COLORS[5])):
        fork = counts.index(p)
        together = [get_point(column, m / p) for column, m in enumerate(counts[: fork + 1])]
        gpipe = [get_point(column, m / p) for column, m in enumerate(counts) if column >= fork]
        flat = [get_point(fork, 1), get_point(7.5, 1)]
        for points, style in ((together, "-"), (gpipe, (0, (4, 2))), (flat, "-")):
            axes.plot(*zip(*points, strict=True), color=color, lw=2, ls=style)
        axes.plot(*get_point(fork, 1), "o", color=color, markersize=6)
    for words, (x, y) in (
        ("GPipe, p = 4", get_point(6.1, 24)),
        ("GPipe, p = 16", get_point(7.5, 2)),
        ("1F1B, p = 4 and p = 16", get_point(7.5, 0.5)),
    ):
        axes.text(x, y, words, ha="right", va="center", fontsize=10)
    for y in (0.49, bottom + 0.19):
        axes.text(left - 0.1, y, "m =", ha="right", va="center", fontsize=10)
        for column, m in enumerate(counts):
            axes.text(get_point(column, 1)[0], y, str(m), ha="center", va="center", fontsize=10)
    show.save_svg(
        figure,
        HERE / "pipeline_choose.svg",
        "Above, the bubble for 2 to 32 stages and 1 to 128 micro-batches: from 97 % for 32 stages "
        "and one micro-batch to below 1 % for 2 stages and 128; it is at most 20 % with four "
        "times as many micro-batches as stages. Below, the first stage's peak activations, in "
        "units of one micro-batch's activations in all layers: GPipe's grow with the "
        "micro-batches, to 32 units for 4 stages and 128 micro-batches; 1F1B's stop at one unit, "
        "for 4 stages as for 16.",
    )


def simulate(name: str, microbatches: int, **times: float) -> pipeline.Timeline:
    """Simulate four stages; a forward takes 1, a whole backward 2, unless `times` override them."""
    return pipeline.simulate(pipeline.make_schedule(name, 4, microbatches), **times)


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def draw_microbatches() -> None:
    whole = simulate("naive", 1, forward=4, backward_input=4, backward_weight=4)
    loop, gpipe = simulate("naive", 4), simulate("gpipe", 4)
    names = (
        "the whole batch at once",
        "four micro-batches, in a loop",
        "four micro-batches, GPipe",
    )
    shown = (whole, loop, gpipe)
    titles = [
        f"{name}: busy {percent(1 - timeline.bubble)}"
        for name, timeline in zip(names, shown, strict=True)
    ]
    show.save_svg(
        draw_timelines(shown, titles, width=4.8),
        HERE / "pipeline_microbatches.svg",
        "Three timelines of four stages on one axis. The whole batch at once: one stage computes "
        f"at a time, and each is busy {percent(1 - whole.bubble)} of the time. Four micro-batches "
        "in a loop, forward and backward of one before the next begins: still one stage at a time, "
        f"still {percent(1 - loop.bubble)}. GPipe, forwards of all four and then backwards of all "
        f"four: stages overlap, each is busy {percent(1 - gpipe.bubble)} of the time, and the step "
        "takes less than half as long.",
    )


def draw_memory() -> None:
    shown = [simulate("gpipe", 8), simulate("1f1b", 8)]
    held = [[f"{most:g}" for most in timeline.peak_activations] for timeline in shown]
    titles = [f"{name}: bubble {percent(shown[0].bubble)}" for name in ("GPipe", "1F1B")]
    show.save_svg(
        draw_timelines(shown, titles, held, ["holds"] * 2),
        HERE / "pipeline_memory.svg",
        "GPipe above 1F1B, four stages and eight micro-batches: both take the same time and have "
        "the same bubble. At its peak each stage of GPipe holds activations of 8 micro-batches; "
        "the stages of 1F1B hold those of 4, 3, 2 and 1.",
    )


def draw_interleaved() -> None:
    shown = [simulate("1f1b", 8), simulate("interleaved", 8)]
    bubbles = [percent(timeline.bubble) for timeline in shown]
    titles = [f"1F1B: bubble {bubbles[0]}", f"interleaved, two chunks: bubble {bubbles[1]}"]
    show.save_svg(
        draw_timelines(shown, titles),
        HERE / "pipeline_interleaved.svg",
        "1F1B above interleaved 1F1B with two chunks for each of four stages, eight micro-batches. "
        "Boxes are half as long and twice as many, the ramps at both ends are half as long, and "
        f"the bubble falls from {bubbles[0]} to {bubbles[1]}.",
    )


def draw_zero_bubble() -> None:
    shown = [simulate(name, 8) for name in ("1f1b", "zb-h1", "zb-h2", "zb-v")]
    titles = [
        f"{timeline.schedule.name.upper()}: bubble {percent(timeline.bubble)}, "
        f"holds up to {max(timeline.peak_activations):g}"
        for timeline in shown
    ]
    show.save_svg(
        draw_timelines(shown, titles),
        HERE / "pipeline_zero_bubble.svg",
        "Four schedules on one axis, four stages and eight micro-batches, with forward and both "
        f"halves of the backward equally long. {'; '.join(titles)} micro-batches. Where the "
        "backward is split, the passes for the weights fill time in which 1F1B idles.",
    )


def main() -> None:
    draw_cut()
    draw_microbatches()
    draw_memory()
    draw_placement()
    draw_interleaved()
    draw_zero_bubble()
    draw_messages()
    draw_choose()


if __name__ == "__main__":
    main()
