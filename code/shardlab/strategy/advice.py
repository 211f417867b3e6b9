"""What a layout lacks, in a sentence: where its bytes are, or where its seconds go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardlab import memory
from shardlab.machines import RESERVE, Machine, room
from shardlab.shapes import Config

from .cost import Seconds, seconds
from .layout import Layout, peak


def fullness(
    config: Config,
    machine: Machine,
    layout: Layout,
    seq: int | None = None,
    reserve: float = RESERVE,
) -> str:
    """Why `layout` does not fit, and one change that would do; "" if it fits.

    Raises ValueError for a shape that cannot be cut so.
    """
    there, needs = room(machine, reserve), peak(config, layout, seq)
    if needs <= there:
        return ""

    def fits(**change: Any) -> bool:
        return peak(config, replace(layout, **change), seq) <= there

    words = f"Its fullest GPU needs {needs / 1e9:.1f} GB, and {there / 1e9:.1f} are there."
    if layout.tp > 1 and not layout.sequence_parallel and fits(sequence_parallel=True):
        return (
            f"{words} What stands between the cut matrices is whole on each of the t GPUs: "
            "sequence parallelism shares it."
        )
    if layout.zero == 0 and layout.dp > 1 and fits(zero=1):
        return f"{words} Each copy keeps a whole optimizer; copies can share one."
    each = layout.batch // layout.dp
    if layout.micro_batch > 1 and fits(micro_batch=1, microbatches=each):
        return f"{words} Micro-batches of fewer sequences would keep less."
    held = memory.parameters
    most = max(sum(held(config, layout.tp, layout.pp, s).values()) for s in (0, layout.pp - 1))
    states = memory.states(most, zero=layout.zero, dp=layout.dp).total
    words += f" {states / 1e9:.1f} GB of it are model states"
    if states > there:
        return f"{words}: cut the model into more parts, or let its copies share more."
    return f"{words}; the rest are activations, and what is gathered or on its way."


def slowness(config: Config, machine: Machine, layout: Layout, seq: int | None = None) -> str:
    """Where the most of a step's floor goes, beside the arithmetic that every layout needs.

    Raises ValueError for a shape that cannot be cut so.
    """
    parts = seconds(config, machine, layout, seq)
    words = f"A step takes {parts.total:.1f} s at least."
    if layout.tp > machine.per_node:
        return (
            f"{words} t = {layout.tp} reaches beyond a node of {machine.per_node}: the sums of "
            "every layer wait for the links between nodes."
        )
    if parts.data >= parts.total:
        m = layout.microbatches
        often = f" for each of {m} micro-batches" if layout.zero > 1 and m > 1 else ""
        return f"{words} All of it the copies send to each other{often}."
    losses = _losses(layout, parts)
    most = max(losses, key=lambda name: losses[name])
    return f"{words} {losses[most]:.1f} s of it {most}" if losses[most] else words


def _losses(layout: Layout, parts: Seconds) -> dict[str, float]:
    twice = parts.arithmetic / 4 if layout.recompute == "full" else 0.0  # one pass of four
    return {
        "are arithmetic that is done twice: is recomputation needed?": twice,
        "are sums inside of the layers, over the tensor group.": parts.tensor,
        "are the bubble: more, and smaller, micro-batches make it shorter.": parts.bubble,
    }
