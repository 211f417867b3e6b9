"""Timelines of computation and communication with and without overlap, measured and drawn.

`trace_steps` measures on ranks; `draw_timeline` draws its runs. The lesson on data parallelism and
its picture use both.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardlab.common import show, text
from shardlab.data_parallel.buckets import MIB
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.measure import link

from .core import Bucket, DataParallel, assign_buckets, average_in_buckets

INK = show.INK
COLORS = show.RANK_COLORS
Run = dict[str, Any]


def trace_steps(batch: int, steps: int, latency: float, bandwidth: float) -> dict[str, list[Run]]:
    """Time steps with and without overlap, in turn, on an emulated link (runs on each rank).

    Each step is {"forward": end, "backward": end, "wait": end, "step": end, "buckets": [[ready,
    send begins, send ends], …]}, in seconds since the step began on this rank.
    """
    wire = link.create_slow_group(latency, bandwidth)
    plain = GPT(PRESETS["mini"])
    hooked = DataParallel(copy.deepcopy(plain), wire, bucket_bytes=4 * MIB)
    assigned = assign_buckets(plain.parameters(), bucket_bytes=4 * MIB)
    buckets = [Bucket(parameters, wire) for parameters in assigned]
    optimizers = {model: torch.optim.AdamW(model.parameters()) for model in (plain, hooked)}
    tokens, targets = text.get_batch(128, batch, start=batch * dist.get_rank())

    def step(model: torch.nn.Module) -> Run:
        dist.barrier()
        wire.log.clear()
        marks = [time.monotonic()]
        optimizers[model].zero_grad()
        value = loss(model(tokens), targets)
        marks.append(time.monotonic())
        value.backward()
        marks.append(time.monotonic())
        if model is plain:
            average_in_buckets(buckets)
        else:
            marks[-1] = wire.log[-1][2]  # backward's computing ended when the last bucket was ready
        marks.append(time.monotonic())
        optimizers[model].step()
        marks.append(time.monotonic())
        names = ("forward", "backward", "wait", "step")
        run: Run = {k: t - marks[0] for k, t in zip(names, marks[1:], strict=True)}
        run["buckets"] = [[moment - marks[0] for moment in entry[2:]] for entry in wire.log]
        return run

    for model in (plain, hooked):
        step(model)
    runs = [(step(plain), step(hooked)) for _ in range(steps)]
    return {"without": [run[0] for run in runs], "with": [run[1] for run in runs]}


def pick_median(runs: list[Run]) -> Run:
    """Return the run whose step took the median time."""
    return sorted(runs, key=lambda run: run["step"])[len(runs) // 2]


def draw_timeline(without: Run, with_overlap: Run) -> Figure:
    """Draw one rank's computation and communication, without and with overlap, over time."""
    show.set_style()
    figure, panels = plt.subplots(2, 1, figsize=(4.7, 3.9), sharex=True)
    figure.subplots_adjust(hspace=0.42)
    longest = max(without["step"], with_overlap["step"])
    for axes, run, words in (
        (panels[0], without, "gradients are sent after backward"),
        (panels[1], with_overlap, "each bucket is sent as soon as it is full"),
    ):
        _draw_lanes(axes, run)
        axes.set_title(f"{words}: {1e3 * run['step']:.0f} ms", loc="left", fontsize=10.5)
        axes.set_xlim(0, 1.03 * longest)
    gain = 1 - with_overlap["step"] / without["step"]
    end = with_overlap["step"]
    if gain > 0.05:
        panels[1].annotate(
            f"{100 * gain:.0f} % less",
            (end, 1.4),
            (end + 0.02 * longest, 1.4),
            ha="left",
            va="center",
            fontsize=12,
            fontweight="bold",
        )
    panels[1].set_xlabel("milliseconds since the step began")
    panels[1].xaxis.set_major_formatter(lambda value, _: f"{1e3 * value:.0f}")
    return figure


def _draw_lanes(axes: Axes, run: Run) -> None:
    """Draw one run: the rank's computation in the upper lane, its link in the lower lane."""
    axes.set_ylim(-0.4, 2.2)
    axes.set_yticks([1.4, 0.1], ["compute", "link"])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)

    def draw_bar(begin: float, end: float, y: float, color: str, **style: Any) -> None:
        style = {"lw": 0} | style
        axes.add_patch(Rectangle((begin, y - 0.4), end - begin, 0.8, fc=color, **style))

    def draw_label(begin: float, end: float, words: str) -> None:
        axes.text((begin + end) / 2, 1.97, words, ha="center", va="center", fontsize=10)

    forward, backward, wait, step = (run[k] for k in ("forward", "backward", "wait", "step"))
    draw_bar(0, forward, 1.4, "none", ec=INK, lw=0.8)
    draw_label(0, forward, "forward")
    draw_label(forward, backward, "backward")
    if wait - backward > 0.25 * step:  # wide enough for the label
        draw_label(backward, wait, "waiting")
    draw_bar(wait, step, 1.4, "none", ec=INK, lw=0.8)
    draw_label(wait, step, "step")
    together = run["buckets"][0][0] >= backward  # no bucket was sent before backward ended
    if together:
        draw_bar(forward, backward, 1.4, COLORS[0])
    begin = forward
    for number, (ready, leaves, arrives) in enumerate(run["buckets"]):
        color = COLORS[0] if number % 2 else COLORS[4]
        if not together:
            draw_bar(begin, ready, 1.4, color)
            axes.plot([ready, leaves], [1.0, 0.5], color=INK, lw=0.7, alpha=0.6)
            begin = ready
        draw_bar(leaves, arrives, 0.1, color)
