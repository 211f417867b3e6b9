"""What a layout lacks, in a sentence: where its bytes are, or where its seconds go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardlab.layout import Layout, Structure
from shardlab.layout.structure import check_tensor_degree
from shardlab.machines import Machine
from shardlab.shapes import Config

from .core import Seconds
from .predict import predict, room


def fullness(
    config: Config | Structure, machine: Machine, layout: Layout, seq: int | None = None
) -> str:
    """Why `layout` does not fit, and one change that would do; "" if it fits.

    Bytes are predicted, of the course's own model. Raises ValueError as `predict` does, and for
    heads that this model cannot be cut into.
    """
    check_tensor_degree(config, layout.tp, copies=True)
    there, found = room(machine), predict(config, machine, layout, seq=seq).memory
    if found.reserved <= there:
        return ""

    def fits(**change: Any) -> bool:
        changed = predict(config, machine, replace(layout, **change), seq=seq)
        return changed.memory.reserved <= there

    needs = f"{found.reserved / 1e9:.1f} GB"
    words = f"Its fullest GPU needs {needs}, and {there / 1e9:.1f} are there."
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
    states = found.weights + found.gradients + found.optimizer
    words += f" {states / 1e9:.1f} GB of it are model states"
    if states > there:
        return f"{words}: cut the model into more parts, or let its copies share more."
    return f"{words}; the rest are activations, and what is gathered or on its way."


def slowness(
    config: Config | Structure, machine: Machine, layout: Layout, seq: int | None = None
) -> str:
    """What a step waits for the most, beside the arithmetic that every layout needs.

    Seconds are predicted, of the course's own model. Raises ValueError as `predict` does.
    """
    found = predict(config, machine, layout, seq=seq).seconds
    words = f"A step takes some {_digits(found.total)} s."
    if layout.tp > machine.per_node:
        return (
            f"{words} t = {layout.tp} reaches beyond a node of {machine.per_node}: the sums of "
            "every layer wait for the links between nodes."
        )
    losses = waits(layout, found)
    most = max(losses, key=lambda name: losses[name])
    if losses[most] < 0.01 * found.total:
        return words
    return f"{words} {_digits(losses[most])} s of it {most}"


def _digits(seconds: float) -> str:
    """Three of them, and no exponent."""
    return f"{float(f'{seconds:.3g}'):,g}"


def waits(layout: Layout, found: Seconds) -> dict[str, float]:
    """Seconds of a step that another layout might save, by a sentence's end that says so."""
    products = found.products + found.attention
    twice = products / 4 if layout.recompute == "full" else 0.0  # one pass of four
    m = layout.microbatches
    often = f", for each of {m} micro-batches" if layout.zero > 1 and m > 1 else ""
    return {
        "are arithmetic that is done twice: is recomputation needed?": twice,
        "are sums inside of the layers, over the tensor group.": found.tensor,
        "are the bubble: more, and smaller, micro-batches make it shorter.": found.bubble,
        f"are waits of the copies for each other{often}.": found.data,
        "are messages between stages.": found.messages,
        "are waits for the CPU: larger micro-batches give it more time.": found.launches,
        "are keys and values of other ranks of the same sequence.": found.context,
        "are tokens on their way to experts, and back.": found.experts,
        "are the allocator's retries: memory is short.": found.retries,
    }
