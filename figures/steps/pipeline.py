"""Draw the whole batch at once, and 1F1B, in steps (python figures/steps/pipeline.py).

A timeline is simulated, as everywhere in that lesson; each step shows it up to a time.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from sheet import INK, draw_boxes, save_step

from shardlab import pipeline
from shardlab.common.show.drawing import draw_text, draw_title, make_canvas, pick_text_color
from shardlab.pipeline.simulate import Span, Timeline
from shardlab.pipeline.timeline_figure import IDLE_STYLE, KIND_COLORS, make_box

STAGES, MICROBATCHES = 4, 6
LEFT, TOP, HELD = 0.66, 0.48, 2.18  # left of the rows, tops of both tables
UNIT, TALL, GAP = 0.105, 0.26, 0.06
TIMES = (1, 4, 6, 10, 13, 16, 19, 22, 27)  # the ends of the steps
AT_ONCE = (1, 2, 3, 4, 6, 8, 10, 12)  # the whole batch, stage after stage


def list_held(spans: tuple[Span, ...], now: float) -> list[int]:
    """Return the micro-batches with activations on a stage: forward begun, backward not done."""
    begun = [span.microbatch for span in spans if span.kind == "F" and span.begin < now]
    over = {span.microbatch for span in spans if span.kind == "B" and span.end <= now}
    return [number for number in begun if number not in over]


def describe_moment(whole: Timeline, since: float, now: float) -> str:
    """Return the alternative text: each stage's passes in the step, and its held micro-batches."""
    said = [f"Time {since:g} to {now:g}."]
    for stage, spans in enumerate(whole.spans):
        kinds = {"F": "forward", "B": "backward"}
        passes = [s for s in spans if s.begin < now and s.end > since]
        computes = ", ".join(f"{kinds[s.kind]} {s.microbatch}" for s in passes) or "idle"
        kept = ", ".join(map(str, list_held(spans, now))) or "nothing"
        said.append(f"Stage {stage}: {computes}; then holds {kept}.")
    return " ".join(said)


def draw_row(
    axes: Axes, spans: tuple[Span, ...], top: float, since: float, now: float, unit: float
) -> None:
    """Draw a stage's passes up to now; the passes of this step have a thick edge."""
    shapes: dict[tuple[str, bool], list[Outline]] = {}
    free = 0.0
    idle = []
    for span in [s for s in spans if s.begin < now] + [Span("F", 0, 0, now, now)]:
        if span.begin > free:
            idle.append((LEFT + free * unit, top, (span.begin - free) * unit, TALL))
        free = max(free, span.end)
        end = min(span.end, now)
        wide = (end - span.begin) * unit
        if not wide:
            continue
        x = LEFT + span.begin * unit
        for color, corners in make_box(x, top, wide, TALL, span):
            outline = Outline([*corners, corners[0]], closed=True)
            shapes.setdefault((color, span.end > since), []).append(outline)
        draw_text(
            axes, x + wide / 2, top + TALL / 2, str(span.microbatch), fontsize=8,
            color=pick_text_color(KIND_COLORS[span.kind]),
        )  # fmt: skip
    draw_boxes(axes, idle, **IDLE_STYLE)
    for (color, current), outlines in shapes.items():
        look = {"fc": color, "ec": INK if current else "#222222", "lw": 1.6 if current else 0.4}
        patch = PathPatch(Outline.make_compound_path(*outlines), clip_on=False, **look)
        axes.add_patch(patch)


def draw(name: str, number: int, whole: Timeline, since: float, now: float) -> None:
    unit = 27 * UNIT / whole.step_time  # gives both pictures the same width
    figure, axes = make_canvas(LEFT + 27 * UNIT + 0.08, 3.5)
    draw_title(axes, LEFT, 0.16, f"time {since:g} to {now:g}", ha="left")
    for said, kind, x in (("forward", "F", 1.55), ("backward", "B", 2.45)):
        draw_boxes(axes, [(LEFT + x - 0.26, 0.06, 0.2, 0.2)], fc=KIND_COLORS[kind], lw=0)
        draw_text(axes, LEFT + x, 0.16, said, ha="left", fontsize=9)
    draw_title(axes, LEFT, HELD - 0.16, "holds activations of", ha="left")
    for stage, spans in enumerate(whole.spans):
        top = TOP + stage * (TALL + GAP)
        draw_row(axes, spans, top, since, now, unit)
        below = HELD + stage * (TALL + GAP)
        for y in (top, below):
            draw_text(axes, LEFT - 0.08, y + TALL / 2, f"stage {stage}", ha="right")
        kept = list_held(spans, now)
        places = [(LEFT + i * 0.3, below, 0.26, TALL) for i in range(len(kept))]
        draw_boxes(axes, places, fc=KIND_COLORS["F"], ec=INK, lw=0.8)
        for (x, _, wide, _), microbatch in zip(places, kept, strict=True):
            ink = pick_text_color(KIND_COLORS["F"])
            draw_text(axes, x + wide / 2, below + TALL / 2, str(microbatch), color=ink)
    x, foot = LEFT + now * unit, TOP + STAGES * (TALL + GAP)
    axes.plot([x, x], [TOP - 0.1, foot], color=INK, lw=1.2, ls=":", clip_on=False)
    axes.plot([LEFT, LEFT + 27 * UNIT], [foot, foot], color=INK, lw=0.8, clip_on=False)
    axes.plot([LEFT + since * unit, x], [foot, foot], color=INK, lw=4, clip_on=False)
    save_step(figure, name, number, describe_moment(whole, since, now))


def main() -> None:
    for name, schedule, m, times in (
        ("pipeline", "1f1b", MICROBATCHES, TIMES),
        ("pipeline_naive", "naive", 1, AT_ONCE),
    ):
        whole = pipeline.simulate(pipeline.make_schedule(schedule, STAGES, m))  # a backward takes 2
        for number, (since, now) in enumerate(zip((0, *times[:-1]), times, strict=True), 1):
            draw(name, number, whole, since, now)


if __name__ == "__main__":
    main()
