"""Pictures of values that a lesson measures when it runs; static pictures are in figures/."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from shardlab.common import show

from .drawing import pick_text_color

if TYPE_CHECKING:
    from shardlab.measure import count

INK = show.INK
COLORS = show.RANK_COLORS
# These colours do not stand for ranks, so the first four are not among them.
WEIGHTS, GRADIENTS, MOMENTS, ACTIVATIONS = COLORS[4:8]
PHASES = ("forward", "backward", "step")
NO_RANK = [COLORS[i] for i in (4, 5, 7, 2)]  # colours that are easy to tell apart as small dots
Trace = Sequence[tuple[float, int]]


def plot_bytes_held(runs: Sequence[tuple[str, Trace, Sequence[float], int, int]]) -> Figure:
    """Draw the bytes held over a training step, one panel for each run, on one scale.

    A run is (title, trace of `count.track_memory`, the times at which forward began and forward,
    backward and step ended, bytes of weights, bytes of the optimizer's states). The x axis counts
    allocations and frees, whose order is equal in every run, because their times are not.
    """
    show.set_style()
    figure, panels = plt.subplots(
        len(runs), 1, figsize=(4.8, 2.7 * len(runs)), sharey=True, squeeze=False
    )
    top = 1.28 * max(size for _, trace, *_ in runs for _, size in trace) / 1e6
    for axes, (words, trace, marks, weights, moments) in zip(panels[:, 0], runs, strict=True):
        times = [moment for moment, _ in trace]
        begin, *ends = (bisect.bisect_right(times, moment) for moment in marks)
        sizes = np.array([size / 1e6 for _, size in trace[begin - 1 : ends[-1]]])
        end = len(sizes) - 1
        steps = np.diff(np.round(1000 * sizes / top))  # ignore changes that are too small to see
        corners = np.unique([0, *(np.flatnonzero(steps) + 1), end])
        states = weights / 1e6, (weights + moments) / 1e6
        axes.fill_between([0, end], 0, states[0], color=WEIGHTS, lw=0)
        axes.fill_between([0, end], *states, color=MOMENTS, lw=0)
        style = {"step": "post", "color": ACTIVATIONS, "lw": 0}
        axes.fill_between(corners, states[1], sizes[corners], **style)
        peak = int(sizes.argmax())
        axes.plot(peak, sizes[peak] + 0.03 * top, "v", color=INK, markersize=5)
        label = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"peak {sizes[peak]:.0f} MB", (peak, sizes[peak] + 0.03 * top), **label)
        for bottom, high, name, color in (
            (0, states[0], "weights", WEIGHTS),
            (*states, "AdamW’s moments", MOMENTS),
        ):
            style = {"va": "center", "fontsize": 9, "color": pick_text_color(color)}
            axes.text(end / 60, (bottom + high) / 2, name, **style)
        first, second, last = (stop - begin + 1 for stop in ends)
        for name, at, side in (
            ("activations", first + (second - first) // 20, "left"),
            ("gradients", (second + last) // 2, "center"),
        ):
            if sizes[at] - states[1] > 0.08 * top:  # high enough for the label
                style = {"ha": side, "va": "center", "fontsize": 9}
                style["color"] = pick_text_color(ACTIVATIONS)
                axes.text(at, (sizes[at] + states[1]) / 2, name, **style)
        start = 0
        for name, stop in zip(PHASES, ends, strict=True):
            stop -= begin - 1
            axes.axvline(stop, color=INK, lw=0.6, alpha=0.5)
            place = (start + stop) / 2, 0.98 * top
            axes.text(*place, name, ha="center", va="top", fontsize=10)
            start = stop
        axes.set_title(words, loc="left", fontsize=12)
        axes.set_ylabel("MB held")
        axes.set_ylim(0, top)
        axes.set_xlim(0, end)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panels[-1, 0].set_xlabel("tensors made and freed since forward began")
    figure.tight_layout()
    return figure


def plot_roofline(rates: count.Rates, points: Sequence[tuple[str, float, float]]) -> Figure:
    """Draw a machine's roofline with measured points (name, FLOP per byte, FLOP/s)."""
    show.set_style()
    figure, axes = plt.subplots(figsize=(6.2, 3.6))
    left = min(intensity for _, intensity, _ in points) / 3
    right = max(intensity for _, intensity, _ in points) * 6
    reach = np.geomspace(left, right, 200)
    axes.loglog(reach, [rates.get_attainable_flops(x) / 1e9 for x in reach], color=INK, lw=1.6)
    axes.axvline(rates.ridge_point, color=INK, lw=0.7, ls=(0, (3, 3)))
    low = min(reached for _, _, reached in points) / 1e9 / 4
    axes.set_ylim(low, rates.flops / 1e9 * 4)
    axes.set_xlim(left, right)
    words = f"ridge: {rates.ridge_point:.1f} FLOP per byte"
    axes.annotate(words, (rates.ridge_point, low), (6, 6), textcoords="offset points", fontsize=10)
    high = rates.flops / 1e9 * 3.6
    for words, side, shift in (("memory limits", "right", -8), ("compute limits", "left", 8)):
        style = {"ha": side, "va": "top", "fontsize": 10, "fontweight": "bold"}
        place = {"xytext": (shift, 0), "textcoords": "offset points"}
        axes.annotate(words, (rates.ridge_point, high), **place, **style)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    for i, (name, intensity, reached) in enumerate(points):
        axes.plot(intensity, reached / 1e9, "o", color=COLORS[i], markersize=8)
        # Labels go to the lower right, except at the right edge and beside another label.
        twin = any(0.7 < intensity / other < 1.4 for _, other, _ in points[:i])
        x, y, side = (-9, 9, "right") if twin else (9, -10, "left")
        if intensity > right / 40:
            x, y, side = -9, -10, "right"
        style = {"textcoords": "offset points", "ha": side, "va": "center", "fontsize": 10}
        axes.annotate(name, (intensity, reached / 1e9), (x, y), **style)
    axes.set_xlabel("FLOP for each byte moved")
    axes.set_ylabel("GFLOP/s")
    return figure


def plot_layouts(points: Sequence[tuple[float, float, object]]) -> Figure:
    """Draw a dot for each (GB of the fullest rank, seconds of a step, layout).

    The layout's `tp` and `pp` determine the dot's colour and shape.
    """
    show.set_style()
    figure, axes = plt.subplots(figsize=(4.6, 3.2))
    cuts = {
        "copies": (lambda t, p: t == p == 1, "o"),
        "and tensor": (lambda t, p: t > 1 and p == 1, "s"),
        "and a pipeline": (lambda t, p: t == 1 and p > 1, "^"),
        "and both": (lambda t, p: t > 1 and p > 1, "D"),
    }
    for (name, (which, shape)), color in zip(cuts.items(), NO_RANK, strict=True):
        mine = [(x, y) for x, y, at in points if which(at.tp, at.pp)]  # type: ignore[attr-defined]
        if mine:
            label = f"{name} ({len(mine)})"
            axes.plot(*zip(*mine, strict=True), shape, color=color, markersize=4, label=label)
    axes.set_xlabel("GB that the fullest GPU reserves")
    axes.set_ylabel("seconds of a step")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


def plot_prediction_ratios(groups: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Draw predicted / measured of each group's (predicted, measured) seconds, and a 10 % band."""
    show.set_style()
    figure, axes = plt.subplots(figsize=(4.6, 3.0))
    for (name, pairs), color, shape in zip(groups.items(), NO_RANK, "osD^", strict=False):
        style = {"color": color, "markersize": 6, "label": f"{name} ({len(pairs)})"}
        axes.semilogx([s for _, s in pairs], [p / s for p, s in pairs], shape, **style)
    axes.axhspan(0.9, 1.1, color=INK, alpha=0.08, lw=0)
    axes.axhline(1, color=INK, lw=0.8)
    axes.set_ylim(0.7, 1.3)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("measured seconds of a step")
    axes.set_ylabel("predicted / measured")
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    return figure
