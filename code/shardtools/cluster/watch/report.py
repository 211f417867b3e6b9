"""A picture of a job: the use of each rank over time, and its steps, from `sample`'s files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from shardlab.common import show

Sample = dict[str, Any]


def read_samples(path: Path) -> list[Sample]:
    """Read a file of JSON lines; a last line that was cut off is ignored."""
    text = path.read_text("utf-8", errors="replace")
    try:
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except ValueError as error:
        raise ValueError(f"{path}: must have lines of JSON ({error})") from None


def draw_report(folder: str | Path) -> Figure:
    """Draw the use of each rank over time, and the job's steps.

    Reads samples-*.jsonl, and metrics.jsonl if its lines have a `time`. Shows GPUs if the ranks
    have any, else CPU cores and memory. Raises ValueError for a folder without samples.
    """
    samples = [
        line for path in sorted(Path(folder).glob("samples-*.jsonl")) for line in read_samples(path)
    ]
    if not samples:
        raise ValueError(f"folder={str(folder)!r}: must be a folder with samples-*.jsonl")
    metrics = Path(folder) / "metrics.jsonl"
    steps = [s for s in (read_samples(metrics) if metrics.exists() else ()) if "time" in s]
    show.set_style()
    figure, panels = plt.subplots(3 + bool(steps), 1, figsize=(6.4, 6.4), sharex=True)
    start = min(line["time"] for line in samples)
    gpus = any("gpu" in line for line in samples)
    ranks = sorted({line["rank"] for line in samples if "rank" in line})
    for rank in ranks:
        mine = [line for line in samples if line.get("rank") == rank]
        use = [line.get("gpu", line) for line in mine]
        busy = "utilisation_percent" if gpus else "cpu_percent"
        times = [line["time"] - start for line in mine]
        color = show.RANK_COLORS[rank % len(show.RANK_COLORS)]
        for axes, name, unit in ((panels[0], busy, 1), (panels[1], "memory_bytes", 1e9)):
            values = [float("nan") if u.get(name) is None else u[name] / unit for u in use]
            axes.plot(times, values, color=color, lw=1.4)
        place = 1 - 0.13 * (len(ranks) - 1 - ranks.index(rank)), 1.04
        style = {"color": color, "fontsize": 9.5, "ha": "right", "transform": panels[0].transAxes}
        panels[0].text(*place, f"rank {rank}", **style)
    for node in sorted({line["node"] for line in samples}):
        wire = [line for line in samples if line["node"] == node and "sent_bytes" in line]
        pairs = [(a, b) for a, b in zip(wire, wire[1:], strict=False) if b["time"] > a["time"]]
        rates = [(b["sent_bytes"] - a["sent_bytes"]) / (b["time"] - a["time"]) for a, b in pairs]
        panels[2].plot([b["time"] - start for _, b in pairs], [r / 1e6 for r in rates], lw=1.2)
        panels[2].lines[-1].set_color(show.INK)
    if steps:
        ends = [step["time"] - start for step in steps]
        panels[3].plot(ends, [1e3 * step["seconds"] for step in steps], "o", ms=3, color=show.INK)
        for axes in panels[:3]:
            axes.axvspan(ends[0] - steps[0]["seconds"], ends[-1], color="#8c8c8c", alpha=0.15, lw=0)
    busy = "GPU busy (% of time)" if gpus else "CPU (% of one core)"
    memory = "GPU memory (GB)" if gpus else "memory (GB)"
    titles = (busy, memory, "sent by the machine (MB/s)", "duration of each step (ms)")
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("seconds since the first sample")
    figure.tight_layout()
    return figure
