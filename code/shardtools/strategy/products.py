"""How long a rank's products of matrices take, and the passes over memory that they need.

Letters as in `core`, which has the rest of a layer. Products reach a share of what the data sheet
has for their format, by the chip; those of experts have few rows each, and one comes after another.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from shardlab.common.machines import MACHINES
from shardlab.layout.structure import Kind, Product

from .job import Job
from .rates import Values

TILE = 128, 256  # of a product's output, which one multiprocessor computes
NUMBER = 2  # bytes of a 16-bit one, in which activations and their gradients are held and sent

# Megatron's rates were found on these; another chip reaches them as its best product does.
A100 = MACHINES["a100"].best


def products(job: Job, rates: Values, kind: Kind) -> float:
    """Seconds of a layer's products, those of a rank's own experts among them.

    Of the experts each has to read its weights, one after another, however few tokens choose it;
    and the step waits for the fullest rank.
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
    """Seconds of a rank's share of a product, for so many rows; None: all tokens."""
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
    """Seconds of rows × inputs times inputs × outputs; None: as many rows as tokens.

    whole: in 16 bits, whatever the format of others is.
    """
    rows = job.tokens if rows is None else rows
    taken = 2 * rows * outputs * inputs / _rate(job, rates, whole)
    if job.profile.waves and job.machine.processors:
        taken *= A100 / (job.machine.best or A100)
        tiles = ceil(rows / TILE[0]) * ceil(outputs / TILE[1])
        taken *= ceil(tiles / job.machine.processors) * job.machine.processors / tiles
    return taken


def _rate(job: Job, rates: Values, whole: bool) -> float:
    """Operations per second that products reach."""
    machine = job.machine
    share = rates.products * (rates.newer if machine.fp4 else 1.0 if machine.fp8 else rates.older)
    if whole or job.flops == machine.flops:
        return reached(job, rates, share) * machine.flops
    return reached(job, rates, share * getattr(rates, job.dtype)) * job.flops


def reached(job: Job, rates: Values, share: float) -> float:
    """A share of the data sheet's rate, held below 1 in the step of an engine that takes longer.

    A rate that was fitted on one GPU may exceed the data sheet of another.
    """
    return min(share, getattr(rates, job.profile.engine) if job.profile.engine else 1.0)


def formats(job: Job, rates: Values, kind: Kind) -> float:
    """Seconds of passes that products need beside them, in a forward pass.

    What goes into products of 8 bits, and what comes out, is cast; rows are put in the experts'
    order, and back; and their biases are added, by engines that do so outside of the products.
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
    """Numbers of a token that a rank's products read and write."""
    found = 0.0
    for one in kind.products:
        t, times = tp, 1.0
        if one.expert and kind.routed:
            t, times = cut, kind.routed.chosen * cut / tp
        both = one.outputs / (t if one.tp == 0 else 1) + one.inputs / (t if one.tp == 1 else 1)
        found += times * both
    return found


def passes(job: Job, rates: Values, width: float) -> float:
    """Seconds in which a number is read or written for each token and `width`."""
    return NUMBER * job.tokens * width / (rates.memory * job.machine.stream)
