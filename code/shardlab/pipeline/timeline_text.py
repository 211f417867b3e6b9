"""Timelines drawn in characters, for a terminal."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import groupby

from .simulate import Span, Timeline

# Characters and words of a drawn timeline.
FILL = {"F": "░", "B": "▓", "I": "▓", "W": "▒"}
LABELS = {"F": "forward", "B": "backward", "I": "backward of input", "W": "backward of weights"}
IDLE = "·"


def format_timeline(timeline: Timeline, width: int = 80) -> str:
    """Draw `timeline` in characters, with lines no longer than `width`.

    A column is a stretch of time and shows the stage's pass at its middle. A pass shows its name if
    it has enough columns, and one letter otherwise.
    """
    schedule = timeline.schedule
    first = min(spans[0].begin for spans in timeline.spans)
    long = max(spans[-1].end for spans in timeline.spans) - first
    name = len(f"stage {schedule.stages - 1}")
    room = width - name - 1
    each = _time_per_column(timeline, long, room)
    columns = min(room, math.ceil(long / each - 1e-9)) if long else room
    lines = []
    for stage, spans in enumerate(timeline.spans):
        stub = f"stage {stage}"
        lines.append(f"{stub:<{name}} {_draw_row(spans, first, each, columns, schedule.chunks)}")
    end = f"{long:.5g}"
    lines.append(f"{'time':<{name}} 0{'─' * (columns - len(end) - 1)}{end}")
    kinds = [kind for kind in LABELS if any(s.kind == kind for row in timeline.spans for s in row)]
    key = [f"{kind}{FILL[kind]} {LABELS[kind]}" for kind in kinds]
    entries = [*key, f"{IDLE} idle", f"a column is {each:.3g} of time"]
    for entry in entries:  # as many to a line as fit
        if entry is entries[0] or len(lines[-1]) + 3 + len(entry) > width:
            lines.append(entry)
        else:
            lines[-1] += f"   {entry}"
    return "\n".join(lines)


def _time_per_column(timeline: Timeline, long: float, room: int) -> float:
    """Return the time per column: the least that fits, with whole columns per pass if possible."""
    times = [span.end - span.begin for spans in timeline.spans for span in spans]
    shortest = min((time for time in times if time > 0), default=0.0)
    if not shortest:
        return long / room or 1.0
    whole = math.floor(room * shortest / long + 1e-9)
    even = all(abs(time / shortest - round(time / shortest)) < 1e-6 for time in times)
    return shortest / whole if whole and even else long / room


def _draw_row(spans: tuple[Span, ...], first: float, each: float, width: int, chunks: int) -> str:
    begins = [span.begin for span in spans]
    shown: list[Span | None] = []
    for column in range(width):
        middle = first + (column + 0.5) * each
        place = bisect_right(begins, middle) - 1
        span = spans[place] if place >= 0 else None
        shown.append(span if span and middle < span.end else None)
    row = ""
    for span, stretch in groupby(shown):
        long = len(list(stretch))
        if span is None:
            row += IDLE * long
        else:
            short = f"{span.kind}{span.microbatch}"
            label = f"{short}.{span.chunk}" if chunks > 1 else short
            words = next((word for word in (label, short) if len(word) <= long), span.kind)
            row += words.ljust(long, FILL[span.kind])
    return row
