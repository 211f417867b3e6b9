"""One timeline of all ranks, from the traces of torch's profiler: compute, messages, overlap.

    with torch.profiler.profile(schedule=…) as profiler:  # on every rank, for a few steps
        ...
    profiler.export_chrome_trace(f"traces/rank{rank}.json")

    figure = picture(read("traces"))

Each trace opens in Perfetto by itself. What a single one does not show is who waits for whom, so
here all lie on one axis: a trace's times count from a moment that it names (`baseTimeNanoseconds`),
and the ranks of one machine share its clock.

What counts as what: on a GPU its kernels, of which those of nccl are messages, and its copies: to
another GPU they are messages, within it (and memsets) they compute, and those from and to the host
are neither. On the CPU torch's operators (aten), and gloo's own spans. `data_parallel.overlap`
draws the same idea for one lesson, from the marks that an emulated wire keeps, without a profiler.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from shardlab.common import show

Span = tuple[float, float]  # begin and end, in seconds
_PHASES = ("forward", "backward", "optimizer")  # names that a script gives with record_function
# The profiler's categories of what runs on a GPU, and its names there.
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_MESSAGE = re.compile(r"nccl|Memcpy PtoP")
_HOST = re.compile(r"Memcpy (HtoD|DtoH|HtoH)")


@dataclass(frozen=True)
class Trace:
    """What one rank did; moments are seconds since 1970."""

    rank: int
    compute: list[Span]  # none of them overlap, nor do those of messages
    messages: list[Span]
    phases: list[tuple[str, Span]]
    copies: list[Span] = field(default_factory=list)  # between a GPU and its host

    @property
    def sending(self) -> float:
        """Seconds in which messages were under way."""
        return _length(self.messages)

    @property
    def hidden(self) -> float:
        """Share of that in which the rank computed; 1 without messages."""
        return _length(_both(self.compute, self.messages)) / self.sending if self.sending else 1.0


def read(folder: str | Path) -> list[Trace]:
    """The traces of all ranks in a folder: every *.json with a number in its name, in rank order.

    Raises ValueError for a folder without one, and for a file that is no trace of the profiler.
    """
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            found.append(parse(json.loads(path.read_text("utf-8")), path.stem))
        except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError):
            raise ValueError(f"{path}: allowed are traces of torch.profiler") from None
    if not found:
        raise ValueError(f"folder={str(folder)!r}: allowed is a folder with traces, rank0.json, …")
    return sorted(found, key=lambda trace: trace.rank)


def parse(trace: Mapping[str, Any], name: str = "") -> Trace:
    """What a trace, read from its JSON, says of one rank."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e9
    about = trace.get("distributedInfo", {})
    number = re.search(r"\d+", name)
    rank = about["rank"] if "rank" in about else int(number[0]) if number else 0
    spans = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            begin = base + event["ts"] / 1e6
            span = begin, begin + event["dur"] / 1e6
            spans.append((event.get("cat", ""), event["name"], span))
    on_gpu = [(name, span) for cat, name, span in spans if cat in _ON_GPU]
    copies = [span for name, span in on_gpu if _HOST.match(name)]
    if on_gpu:
        messages = [span for name, span in on_gpu if _MESSAGE.match(name)]
        other = re.compile(f"{_MESSAGE.pattern}|{_HOST.pattern}")
        compute = [span for name, span in on_gpu if not other.match(name)]
    else:
        compute = [s for cat, name, s in spans if cat == "cpu_op" and name.startswith("aten::")]
        # A barrier carries nothing; it would show the waiting before the first step.
        carries = re.compile(r"gloo:(?!barrier)")
        messages = [span for _, name, span in spans if carries.match(name)]
    phases = [(n, s) for cat, n, s in spans if cat == "user_annotation" and n in _PHASES]
    phases.sort(key=lambda phase: phase[1])
    return Trace(rank, merged(compute), merged(messages), phases, merged(copies))


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time, as spans that do not overlap, in order."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def _both(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The time that is in both; within each, no spans overlap."""
    out, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            out.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return out


def _length(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def picture(traces: Sequence[Trace]) -> Figure:
    """Two lanes for each rank: what it computes, and its messages; dark where both go on.

    Copies between a GPU and its host are grey, in the lane of what it computes.
    """
    show.style()
    figure, axes = plt.subplots(figsize=(6.4, 0.7 + 1.0 * len(traces)))
    every = [span for t in traces for span in (*t.compute, *t.messages, *t.copies)]
    start, last = min(begin for begin, _ in every), max(end for _, end in every)
    pixel = (last - start) / 500  # gaps below it would not show, and there are thousands
    labels, places = [], []

    def bars(spans: Iterable[Span], y: float, **style: Any) -> None:
        wide = [(begin, end + pixel) for begin, end in spans]
        drawn = [(begin, end - pixel) for begin, end in merged(wide)]
        widths = [(1e3 * (begin - start), 1e3 * (end - begin)) for begin, end in drawn]
        axes.broken_barh(widths, (y, 0.8), lw=0, **style)

    for row, trace in enumerate(traces):
        color, y = show.RANK_COLORS[trace.rank % len(show.RANK_COLORS)], 2.6 * row
        bars(trace.copies, y, color=show.INK, alpha=0.3)
        bars(trace.compute, y, color=color)
        bars(trace.messages, y + 1, color=color, alpha=0.45)
        bars(_both(trace.compute, trace.messages), y + 1, color=color)
        for name, (begin, end) in trace.phases:
            if row == 0 and end - begin > 0.1 * (last - start):
                middle = 1e3 * ((begin + end) / 2 - start)
                axes.text(middle, y - 0.15, name, ha="center", va="bottom", fontsize=9)
        labels += [f"rank {trace.rank} computes", f"messages, {100 * trace.hidden:.0f} % hidden"]
        places += [y + 0.4, y + 1.4]
    axes.set_yticks(places, labels)
    axes.tick_params(axis="y", length=0, labelsize=9.5)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(places[-1] + 0.6, -0.8)
    axes.set_xlabel("milliseconds")
    figure.tight_layout()
    return figure
