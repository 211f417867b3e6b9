"""Seconds of a rank's matrix products, and of the memory passes that they need.

Symbols as in `core`. Products reach a share of the data sheet's rate that depends on chip and
format; the products of experts have few rows each, and run one after another.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from shardlab.common.machines import MACHINES
from shardlab.layout.structure import Kind, Product

from .job import Job
from .rates import Values

TILE = 128, 256  # shape of a product's output tile, which one multiprocessor computes
NUMBER = 2  # bytes of a number in activations and their gradients

# Megatron's rates were fitted on A100s; another chip's are scaled by its best product's rate.
A100 = MACHINES["a100"].best


def products(job: Job, rates: Values, kind: Kind) -> float:
    """Return the seconds of a layer's products, including those of the rank's own experts.

    Every expert reads its weights, however few tokens choose it; the fullest rank sets the time.
    """
    taken = sum(cut(job, rates, one) for one in kind.products if not one.expert)
    if not kind.routed:
        return taken
    here = kind.routed.number // job.layout.ep
    rows = job.tokens * kind.routed.chosen / here * job.layout.cut / job.layout.tp
    own = [one for one in kind.products if one.expert]
    read = sum(NUMBER * one.inputs * one.outputs for one in own) / job.layout.cut
    least = read / (rates.memory * job.machine.stream)
    slow = min(1.0, rates.grouped) * rows / (rows + rates.rows)  # few rows do not fill the chip
    each = max(least, sum(cut(job, rates, one, rows) for one in own) / slow)
    return taken + rates.uneven * here * each


def cut(job: Job, rates: Values, one: Product, rows: float | None = None) -> float:
    """Return the seconds of a rank's shard of a product with `rows` rows (None: all tokens)."""
    t = job.layout.cut if one.expert else job.layout.tp
    outputs = one.outputs / (t if one.tp == 0 else 1)
    return product(job, rates, outputs, one.inputs / (t if one.tp == 1 else 1), rows)


def product(
    job: Job,
    rates: Values,
    outputs: float,
    inputs: float,
    rows: float | None = None,
    whole: bool = False,
) -> float:
    """Return the seconds of a product rows × inputs times inputs × outputs (None: a row per token).

    whole: in 16 bits, whatever format the job's other products have.
    """
    rows = job.tokens if rows is None else rows
    taken = 2 * rows * outputs * inputs / _rate(job, rates, whole)
    if job.profile.waves and job.machine.processors:
        taken *= A100 / (job.machine.best or A100)
        tiles = ceil(rows / TILE[0]) * ceil(outputs / TILE[1])
        taken *= ceil(tiles / job.machine.processors) * job.machine.processors / tiles
    return taken


def _rate(job: Job, rates: Values, whole: bool) -> float:
    """Return the operations per second that products reach."""
    machine = job.machine
    share = rates.products * (rates.newer if machine.fp4 else 1.0 if machine.fp8 else rates.older)
    if whole or job.flops == machine.flops:
        return reached(job, rates, share) * machine.flops
    return reached(job, rates, share * getattr(rates, job.dtype)) * job.flops


def reached(job: Job, rates: Values, share: float) -> float:
    """Return a share of the data sheet's rate, capped at 1 or at the engine's factor of step time.

    A share that was fitted on one GPU may exceed the data sheet of another.
    """
    return min(share, getattr(rates, job.profile.engine) if job.profile.engine else 1.0)


def formats(job: Job, rates: Values, kind: Kind) -> float:
    """Return the forward seconds of memory passes that products need beside their arithmetic.

    8-bit products cast inputs and outputs; rows are permuted into the experts' order, and back; and
    some engines add the experts' biases in passes of their own.
    """
    width = 0.0
    if job.dtype != "bf16":
        width += rates.casts * _ends(kind, job.layout.tp, job.layout.cut)
    if kind.routed and rates.routes:
        rows = kind.routed.chosen * job.layout.cut / job.layout.tp
        width += rates.routes * rows * kind.routed.inputs
        if (first := kind.biased) and job.dtype in ("bf16", "fp8"):
            given, between = job.profile.biased
            width += rows * (given * kind.routed.inputs + between * first / job.layout.cut)
    return passes(job, rates, width)


@lru_cache(maxsize=4096)
def _ends(kind: Kind, tp: int, cut: int) -> float:
    """Count the numbers per token that a rank's products read and write."""
    found = 0.0
    for one in kind.products:
        t, times = tp, 1.0
        if one.expert and kind.routed:
            t, times = cut, kind.routed.chosen * cut / tp
        both = one.outputs / (t if one.tp == 0 else 1) + one.inputs / (t if one.tp == 1 else 1)
        found += times * both
    return found


def passes(job: Job, rates: Values, width: float) -> float:
    """Return the seconds to read or write `width` numbers per token."""
    return NUMBER * job.tokens * width / (rates.memory * job.machine.stream)
