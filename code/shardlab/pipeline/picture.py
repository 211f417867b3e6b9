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
KIND_COLORS = {
    "F": RANK_COLORS[4],
    "B": RANK_COLORS[5],
    "I": RANK_COLORS[5],
    "W": RANK_COLORS[6],
}
WORDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
TALL, GAP = 0.28, 0.06  # height of a row, and between rows
CUT = 0.05  # size of a backward's cut corners
LINE, BOX = 0.3, 0.24  # the legend's line height and box width
IDLE = {"fc": INK, "alpha": 0.12, "lw": 0}
LOW = 0.66  # height of a W's box, as a share of the row
WIDE = 6.4  # width of a page's text
Corners = list[tuple[float, float]]


def draw(
    timelines: Timeline | Sequence[Timeline],
    titles: Sequence[str] | None = None,
    notes: Sequence[Sequence[str]] | None = None,
    heads: Sequence[str] | None = None,
    width: float = WIDE,
    label: str = "time",
) -> Figure:
    """Draw one timeline, or several under each other on one time axis.

    `titles`: one per timeline, by default its name and bubble. `notes`: for each timeline one text
    per stage, shown at the right under the timeline's word in `heads`. `width`: inches. `label`:
    the name of the time axis, with its unit.
    """
    shown = timelines if isinstance(timelines, Sequence) else [timelines]
    titles = [summary(timeline) for timeline in shown] if titles is None else titles
    long = max(_ends(timeline)[1] - _ends(timeline)[0] for timeline in shown) or 1.0
    left = 0.66
    words = [len(str(note)) for rows_ in notes or () for note in rows_]
    words += [len(head) for head in heads or ()]
    right = 0.12 + 0.082 * max(words, default=0)
    unit = (width - left - right) / long
    tops, y = [], 0.0
    for timeline in shown:
        y += 0.34
        tops.append(y)
        y += timeline.schedule.stages * (TALL + GAP) + 0.1
    entries = _entries(shown, left, width)
    height = y + 0.3 + max([down + LINE for _, down, _, _ in entries], default=0)
    figure, axes = make_canvas(width, height)
    for i, (timeline, top) in enumerate(zip(shown, tops, strict=True)):
        draw_title(axes, left, top - 0.16, titles[i], ha="left", fontsize=10.5)
        rows(axes, timeline, left, top, unit)
        if heads:
            place = width - right + 0.1
            axes.text(place, top - 0.16, heads[i], va="center", fontsize=9.5)
        for stage in range(timeline.schedule.stages):
            middle = top + stage * (TALL + GAP) + TALL / 2
            axes.text(left - 0.08, middle, f"stage {stage}", ha="right", va="center", fontsize=9.5)
            if notes:
                place = width - right + 0.1
                axes.text(place, middle, str(notes[i][stage]), va="center", fontsize=9.5)
    _axis(axes, left, y, unit, long, label)
    _legend(axes, y + 0.36, entries, max(timeline.schedule.chunks for timeline in shown))
    return figure


def summary(timeline: Timeline) -> str:
    """Describe a timeline in one line: `1f1b, 4 stages, 8 micro-batches: bubble 27.3 %`."""
    of = timeline.schedule
    chunks = f" of {of.chunks} chunks" if of.chunks > 1 else ""
    return (
        f"{of.name}, {of.stages} stage{'s' * (of.stages > 1)}{chunks}, "
        f"{of.microbatches} micro-batch{'es' * (of.microbatches > 1)}: "
        f"bubble {100 * timeline.bubble:.1f} %"
    )


def rows(axes: Axes, timeline: Timeline, x: float, y: float, unit: float) -> None:
    """Draw only the rows of a timeline, from x on, with `unit` inches per unit of time.

    The row of stage s begins at y + s (TALL + GAP), and is as long as the cost of the step. Idle
    time is grey, and all grey is exactly the bubble. Numbers that do not fit into their boxes are
    left out.
    """
    first, _ = _ends(timeline)
    chunks = timeline.schedule.chunks
    outlines: dict[str, list[Corners]] = {}  # by colour; one path per colour keeps the file small
    for stage, spans in enumerate(timeline.spans):
        top = y + stage * (TALL + GAP)
        # A stage that begins late ends late; otherwise it was idle before its first pass.
        now = min(spans[0].begin, max(first, spans[-1].end - timeline.cost))
        over = spans[-1]._replace(begin=now + timeline.cost)
        for span in (*spans, over):
            idle = (x + (now - first) * unit, top), (span.begin - now) * unit, TALL
            if idle[1] > 1e-6:
                axes.add_patch(Rectangle(*idle, **IDLE))
            now = span.end
        for span in spans:
            place, wide = x + (span.begin - first) * unit, (span.end - span.begin) * unit
            for color, corners in box(place, top, wide, TALL, span, chunks):
                outlines.setdefault(color, []).append(corners)
            _number(axes, place, top, wide, span, chunks)
    _fill(axes, outlines)


def box(
    x: float, y: float, wide: float, tall: float, span: Span, chunks: int = 1
) -> list[tuple[str, Corners]]:
    """Return the polygons and colours of a pass whose upper left corner is (x, y)."""
    color = shade(span.kind, span.chunk, chunks)
    right, foot = x + wide, y + tall
    if span.kind in "FW":
        y += (1 - LOW) * tall * (span.kind == "W")
        return [(color, [(x, y), (right, y), (right, foot), (x, foot)])]
    cut = min(CUT, wide / 3)
    left = x + cut
    outline = [(left, y), (right, y), (right, foot), (left, foot), (x, foot - cut), (x, y + cut)]
    if span.kind == "I":
        return [(color, outline)]
    band = [(right, foot - cut), (right, foot), (left, foot), (x, foot - cut)]
    return [(color, outline), (shade("W", span.chunk, chunks), band)]


def _fill(axes: Axes, outlines: dict[str, list[Corners]]) -> None:
    for color, shapes in outlines.items():
        paths = [Path([*corners, corners[0]], closed=True) for corners in shapes]
        # The same edge on light and dark pages: it has to separate one box from the next.
        axes.add_patch(PathPatch(Path.make_compound_path(*paths), fc=color, ec="#222222", lw=0.5))


def _number(axes: Axes, x: float, y: float, wide: float, span: Span, chunks: int) -> None:
    words = str(span.microbatch)
    size = min(8.5, 72 * wide / (0.75 * len(words)))
    if size < 5.0:
        return
    foot = y + TALL - CUT * (span.kind == "B")
    top = foot - LOW * TALL if span.kind == "W" else y
    # Centred by hand: matplotlib would centre the line with its room for descenders.
    base = (top + foot) / 2 + 0.35 * size / 72
    color = pick_text_color(shade(span.kind, span.chunk, chunks))
    axes.text(x + wide / 2, base, words, color=color, ha="center", va="baseline", fontsize=size)


def shade(kind: str, chunk: int = 0, chunks: int = 1) -> str:
    """Return the colour of a pass: that of its kind, lighter for later chunks."""
    white = 0.6 * chunk / max(1, chunks - 1)
    return to_hex([part * (1 - white) + white for part in to_rgb(KIND_COLORS[kind])])


def _ends(timeline: Timeline) -> tuple[float, float]:
    return (
        min(spans[0].begin for spans in timeline.spans),
        max(spans[-1].end for spans in timeline.spans),
    )


def _axis(axes: Axes, x: float, y: float, unit: float, long: float, label: str) -> None:
    axes.plot([x, x + long * unit], [y, y], color=INK, lw=0.8, clip_on=False)
    ticks = [t for t in MaxNLocator(6).tick_values(0, long) if 0 <= t <= long * 1.0001]
    for tick in ticks:
        axes.plot([x + tick * unit] * 2, [y, y + 0.05], color=INK, lw=0.8, clip_on=False)
        axes.text(x + tick * unit, y + 0.18, f"{tick:g}", ha="center", va="center", fontsize=9)
    axes.text(x - 0.16, y + 0.18, label, ha="right", va="center", fontsize=9)


def _entries(
    shown: Sequence[Timeline], x: float, width: float
) -> list[tuple[float, float, list[Span], str]]:
    """Return the legend's entries (x, y, boxes, words), wrapped into lines, with y from 0."""
    kinds = [k for k in WORDS if any(s.kind == k for t in shown for row in t.spans for s in row)]
    chunks = max(timeline.schedule.chunks for timeline in shown)
    whole = {"B": "backward, whole"} if "I" in kinds else {}
    entries = [([Span(kind, 0, 0, 0, 0)], (WORDS | whole)[kind]) for kind in kinds]
    if chunks > 1:
        words = f"chunks 0 {'and' if chunks == 2 else 'to'} {chunks - 1}"
        entries.append(([Span("F", 0, chunk, 0, 0) for chunk in range(chunks)], words))
    entries.append(([], "idle"))
    placed, now, y = [], x, 0.0
    for spans, words in entries:
        long = max(1, len(spans)) * BOX + 0.2 + 0.068 * len(words)
        if now + long > width:
            now, y = x, y + LINE
        placed.append((now, y, spans, words))
        now += long
    return placed


def _legend(
    axes: Axes, y: float, entries: list[tuple[float, float, list[Span], str]], chunks: int
) -> None:
    outlines: dict[str, list[Corners]] = {}
    for x, down, spans, words in entries:
        if not spans:
            axes.add_patch(Rectangle((x, y + down), BOX, 0.2, **IDLE))
            x += BOX
        for span in spans:
            for color, corners in box(x, y + down, BOX, 0.2, span, chunks):
                outlines.setdefault(color, []).append(corners)
            x += BOX
        axes.text(x + 0.07, y + down + 0.1, words, va="center", fontsize=9)
    _fill(axes, outlines)
