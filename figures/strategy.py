"""Draw the pictures of the lesson `strategy` (python figures/strategy.py).

Pictures of what the lesson computes itself are drawn by `shardlab.common.show.plots`.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt

from shardlab.common import show
from shardlab.common.machines import MACHINES
from shardtools.strategy import measured_runs
from shardtools.strategy.profile import ENGINES
from shardtools.strategy.rates import DATA_DIR

HERE = Path(__file__).parent
COLORS = [show.RANK_COLORS[i] for i in (4, 5, 7)]  # not ranks' colours
CHIPS = "v100", "a100", "h100", "b200", "gb200", "rtx-4090"


def draw_walls() -> None:
    """Draw the FLOP per byte of a matrix product, by the byte's place, on each chip."""
    show.set_style()
    figure, axes = plt.subplots(figsize=(4.6, 3.2))
    places = {
        "memory": (lambda chip: chip.memory_bandwidth, "o"),
        "node": (lambda chip: chip.node_bandwidth, "s"),
        "network": (lambda chip: chip.network_bandwidth, "D"),
    }
    for (name, (rate, shape)), color in zip(places.items(), COLORS, strict=True):
        worth = [MACHINES[chip].flops / rate(MACHINES[chip]) for chip in CHIPS]
        axes.semilogx(worth, range(len(CHIPS)), shape, color=color, markersize=7)
        for y, value in enumerate(worth):
            place = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
            axes.annotate(f"{value:,.0f}", (value, y), fontsize=9, **place)
        axes.text(worth[0], -0.85, name, ha="center", fontsize=9, color=color, fontweight="bold")
    axes.set_yticks(range(len(CHIPS)), [MACHINES[chip].name for chip in CHIPS])
    axes.set_ylim(len(CHIPS) - 0.5, -1.15)
    axes.set_xlim(40, 300_000)
    axes.set_xlabel("FLOP per byte of a matrix product")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    show.save_svg(
        figure,
        HERE / "strategy_walls.svg",
        "For six GPUs, on a logarithmic axis, the FLOP of a matrix product that take as long as "
        "moving one byte. V100: 139 from its memory, 833 from its node, 20,000 from the network. "
        "A100: 153, 1,040, 12,480. H100: 295, 2,198, 19,780. B200: 281, 2,500, 45,000. GB200: "
        "312, 2,778, 50,000. RTX 4090: 164, 5,156, 105,600. FLOP/s grew faster than every "
        "bandwidth.",
    )


def draw_engines() -> None:
    """Draw predicted over measured step times of engines, with rates from the other half."""
    show.set_style()
    ratios: dict[str, list[float]] = {}
    for row in measured_runs.read_rows("rows", DATA_DIR / "throughput.csv"):
        if row["cross_validated_s"]:
            job = measured_runs.row_to_job(row, ENGINES)
            measured, _ = measured_runs.row_to_measurement(row, job)
            name = row["source"].split(" (")[0].replace("MosaicML ", "").replace("NeMo A", "A")
            ratios.setdefault(name, []).append(float(row["cross_validated_s"]) / measured)
    figure, axes = plt.subplots(figsize=(4.6, 3.2))
    names = sorted(ratios, key=lambda name: -len(ratios[name]))
    for y, name in enumerate(names):
        found = sorted(ratios[name])
        spread = [y + 0.24 * (k % 5 - 2) / 2 for k in range(len(found))]
        axes.plot(found, spread, "o", color=COLORS[0], markersize=2.5, alpha=0.6)
        axes.plot([median(found)] * 2, [y - 0.34, y + 0.34], color=COLORS[1], linewidth=2.5)
    for x in (0.75, 1.0, 1.25):
        axes.axvline(x, color="0.5", linewidth=0.7, zorder=0)
    axes.set_yticks(range(len(names)), [f"{name} ({len(ratios[name])})" for name in names])
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(0.4, 2.5)
    axes.set_xticks([0.5, 0.75, 1, 1.25, 2], ["0.5", "0.75", "1", "1.25", "2"])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("predicted / measured step time")
    said = ", ".join(f"{name} {median(ratios[name]):.2f} ({len(ratios[name])})" for name in names)
    show.save_svg(
        figure,
        HERE / "strategy_engines.svg",
        "Predicted / measured time of published steps, a dot each, by source, on a logarithmic "
        f"axis; each half is predicted with rates fitted on the other. Medians (steps): {said}.",
    )


if __name__ == "__main__":
    draw_walls()
    draw_engines()
