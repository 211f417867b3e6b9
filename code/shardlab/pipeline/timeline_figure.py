"""Timelines as the papers draw them: a row per stage, a box per pass, time from left to right.

A forward is a plain box. A backward has its left corners cut, because gradients go back that way.
The backward of the weights, for which no neighbour waits, is a low box; a whole backward shows it
as a band at its foot. So shapes distinguish the kinds without colours. The number is that of the
micro-batch; later chunks are lighter. An idle stage's row is grey, and all grey together is the
bubble.

Simulated and measured timelines are drawn by the same code. Lengths are in inches.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from shardlab.common.show import INK, RANK_COLORS
from shardlab.common.show.drawing import draw_title, make_canvas, pick_text_color

from .simulate import Span, Timeline

# Kinds are no ranks, so these are not the first four rank colours.
KIND_COLORS = dict(zip("FBIW", (RANK_COLORS[i] for i in (4, 5, 5, 6)), strict=True))
KIND_LABELS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
ROW_HEIGHT, ROW_GAP = 0.28, 0.06  # height of a row, and between rows
CORNER_CUT = 0.05  # size of a backward's cut corners
LEGEND_LINE, LEGEND_BOX = 0.3, 0.24  # the legend's line height and box width
IDLE_STYLE = {"fc": INK, "alpha": 0.12, "lw": 0}
WEIGHT_BOX_SHARE = 0.66  # height of a W's box, as a share of the row
PAGE_WIDTH = 6.4  # width of a page's text
Corners = list[tuple[float, float]]


def draw_timelines(
    timelines: Timeline | Sequence[Timeline],
    titles: Sequence[str] | None = None,
    notes: Sequence[Sequence[str]] | None = None,
    heads: Sequence[str] | None = None,
    width: float = PAGE_WIDTH,
    label: str = "time",
) -> Figure:
    """Draw one timeline, or several under each other on one time axis.

    `titles`: one per timeline, by default its name and bubble. `notes`: for each timeline one text
    per stage, shown at the right under the timeline's word in `heads`. `width`: inches. `label`:
    the name of the time axis, with its unit.
    """
    shown = timelines if isinstance(timelines, Sequence) else [timelines]
    titles = [summarize_timeline(timeline) for timeline in shown] if titles is None else titles
    long = max(_time_range(timeline)[1] - _time_range(timeline)[0] for timeline in shown) or 1.0
    left = 0.66
    words = [len(str(note)) for rows_ in notes or () for note in rows_]
    words += [len(head) for head in heads or ()]
    right = 0.12 + 0.082 * max(words, default=0)
    unit = (width - left - right) / long
    tops, y = [], 0.0
    for timeline in shown:
        y += 0.34
        tops.append(y)
        y += timeline.schedule.stages * (ROW_HEIGHT + ROW_GAP) + 0.1
    entries = _lay_out_legend(shown, left, width)
    height = y + 0.3 + max([down + LEGEND_LINE for _, down, _, _ in entries], default=0)
    figure, axes = make_canvas(width, height)
    for i, (timeline, top) in enumerate(zip(shown, tops, strict=True)):
        draw_title(axes, left, top - 0.16, titles[i], ha="left", fontsize=10.5)
        draw_rows(axes, timeline, left, top, unit)
        if heads:
            place = width - right + 0.1
            axes.text(place, top - 0.16, heads[i], va="center", fontsize=9.5)
        for stage in range(timeline.schedule.stages):
            middle = top + stage * (ROW_HEIGHT + ROW_GAP) + ROW_HEIGHT / 2
            axes.text(left - 0.08, middle, f"stage {stage}", ha="right", va="center", fontsize=9.5)
            if notes:
                place = width - right + 0.1
                axes.text(place, middle, str(notes[i][stage]), va="center", fontsize=9.5)
    _draw_axis(axes, left, y, unit, long, label)
    _draw_legend(axes, y + 0.36, entries, max(timeline.schedule.chunks for timeline in shown))
    return figure


def summarize_timeline(timeline: Timeline) -> str:
    """Describe a timeline in one line: `1f1b, 4 stages, 8 micro-batches: bubble 27.3 %`."""
    s = timeline.schedule
    chunks = f" of {s.chunks} chunks" if s.chunks > 1 else ""
    m = f"{s.microbatches} micro-batch{'es' * (s.microbatches > 1)}"
    shape = f"{s.name}, {s.stages} stage{'s' * (s.stages > 1)}{chunks}, {m}"
    return f"{shape}: bubble {100 * timeline.bubble:.1f} %"


def draw_rows(axes: Axes, timeline: Timeline, x: float, y: float, unit: float) -> None:
    """Draw only the rows of a timeline, from x on, with `unit` inches per unit of time.

    The row of stage s begins at y + s (ROW_HEIGHT + ROW_GAP), and is as long as the step. Idle time
    is grey, and all grey is exactly the bubble. Numbers that do not fit their boxes are left out.
    """
    first, _ = _time_range(timeline)
    chunks = timeline.schedule.chunks
    outlines: dict[str, list[Corners]] = {}  # by colour; one path per colour keeps the file small
    for stage, spans in enumerate(timeline.spans):
        top = y + stage * (ROW_HEIGHT + ROW_GAP)
        # A stage that begins late ends late; otherwise it was idle before its first pass.
        now = min(spans[0].begin, max(first, spans[-1].end - timeline.step_time))
        over = spans[-1]._replace(begin=now + timeline.step_time)
        for span in (*spans, over):
            idle = (x + (now - first) * unit, top), (span.begin - now) * unit, ROW_HEIGHT
            if idle[1] > 1e-6:
                axes.add_patch(Rectangle(*idle, **IDLE_STYLE))
            now = span.end
        for span in spans:
            place, wide = x + (span.begin - first) * unit, (span.end - span.begin) * unit
            for color, corners in make_box(place, top, wide, ROW_HEIGHT, span, chunks):
                outlines.setdefault(color, []).append(corners)
            _draw_number(axes, place, top, wide, span, chunks)
    _draw_outlines(axes, outlines)


def make_box(
    x: float, y: float, wide: float, tall: float, span: Span, chunks: int = 1
) -> list[tuple[str, Corners]]:
    """Return the colours and polygons of a pass whose upper left corner is (x, y)."""
    color = pass_color(span.kind, span.chunk, chunks)
    right, foot = x + wide, y + tall
    if span.kind in "FW":
        y += (1 - WEIGHT_BOX_SHARE) * tall * (span.kind == "W")
        return [(color, [(x, y), (right, y), (right, foot), (x, foot)])]
    cut = min(CORNER_CUT, wide / 3)
    left = x + cut
    outline = [(left, y), (right, y), (right, foot), (left, foot), (x, foot - cut), (x, y + cut)]
    if span.kind == "I":
        return [(color, outline)]
    band = [(right, foot - cut), (right, foot), (left, foot), (x, foot - cut)]
    return [(color, outline), (pass_color("W", span.chunk, chunks), band)]


def _draw_outlines(axes: Axes, outlines: dict[str, list[Corners]]) -> None:
    for color, shapes in outlines.items():
        paths = [Path([*corners, corners[0]], closed=True) for corners in shapes]
        # The same edge on light and dark pages: it has to separate one box from the next.
        axes.add_patch(PathPatch(Path.make_compound_path(*paths), fc=color, ec="#222222", lw=0.5))


def _draw_number(axes: Axes, x: float, y: float, wide: float, span: Span, chunks: int) -> None:
    words = str(span.microbatch)
    size = min(8.5, 72 * wide / (0.75 * len(words)))
    if size < 5.0:
        return
    foot = y + ROW_HEIGHT - CORNER_CUT * (span.kind == "B")
    top = foot - WEIGHT_BOX_SHARE * ROW_HEIGHT if span.kind == "W" else y
    # Centred by hand: matplotlib would centre the line with its room for descenders.
    base = (top + foot) / 2 + 0.35 * size / 72
    color = pick_text_color(pass_color(span.kind, span.chunk, chunks))
    axes.text(x + wide / 2, base, words, color=color, ha="center", va="baseline", fontsize=size)


def pass_color(kind: str, chunk: int = 0, chunks: int = 1) -> str:
    """Return the colour of a pass: that of its kind, lighter for later chunks."""
    white = 0.6 * chunk / max(1, chunks - 1)
    return to_hex([part * (1 - white) + white for part in to_rgb(KIND_COLORS[kind])])


def _time_range(timeline: Timeline) -> tuple[float, float]:
    begins, ends = zip(*((spans[0].begin, spans[-1].end) for spans in timeline.spans), strict=True)
    return min(begins), max(ends)


def _draw_axis(axes: Axes, x: float, y: float, unit: float, long: float, label: str) -> None:
    axes.plot([x, x + long * unit], [y, y], color=INK, lw=0.8, clip_on=False)
    ticks = [t for t in MaxNLocator(6).tick_values(0, long) if 0 <= t <= long * 1.0001]
    for tick in ticks:
        axes.plot([x + tick * unit] * 2, [y, y + 0.05], color=INK, lw=0.8, clip_on=False)
        axes.text(x + tick * unit, y + 0.18, f"{tick:g}", ha="center", va="center", fontsize=9)
    axes.text(x - 0.16, y + 0.18, label, ha="right", va="center", fontsize=9)


def _lay_out_legend(
    shown: Sequence[Timeline], x: float, width: float
) -> list[tuple[float, float, list[Span], str]]:
    """Return the legend's entries (x, y, boxes, words), wrapped into lines, with y from 0."""
    kinds = [
        k for k in KIND_LABELS if any(s.kind == k for t in shown for row in t.spans for s in row)
    ]
    chunks = max(timeline.schedule.chunks for timeline in shown)
    whole = {"B": "backward, whole"} if "I" in kinds else {}
    entries = [([Span(kind, 0, 0, 0, 0)], (KIND_LABELS | whole)[kind]) for kind in kinds]
    if chunks > 1:
        words = f"chunks 0 {'and' if chunks == 2 else 'to'} {chunks - 1}"
        entries.append(([Span("F", 0, chunk, 0, 0) for chunk in range(chunks)], words))
    entries.append(([], "idle"))
    placed, now, y = [], x, 0.0
    for spans, words in entries:
        long = max(1, len(spans)) * LEGEND_BOX + 0.2 + 0.068 * len(words)
        if now + long > width:
            now, y = x, y + LEGEND_LINE
        placed.append((now, y, spans, words))
        now += long
    return placed


def _draw_legend(
    axes: Axes, y: float, entries: list[tuple[float, float, list[Span], str]], chunks: int
) -> None:
    outlines: dict[str, list[Corners]] = {}
    for x, down, spans, words in entries:
        if not spans:
            axes.add_patch(Rectangle((x, y + down), LEGEND_BOX, 0.2, **IDLE_STYLE))
            x += LEGEND_BOX
        for span in spans:
            for color, corners in make_box(x, y + down, LEGEND_BOX, 0.2, span, chunks):
                outlines.setdefault(color, []).append(corners)
            x += LEGEND_BOX
        axes.text(x + 0.07, y + down + 0.1, words, va="center", fontsize=9)
    _draw_outlines(axes, outlines)
