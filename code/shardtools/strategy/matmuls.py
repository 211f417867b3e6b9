"""Seconds of a rank's matrix products, and of the memory passes that they need.

Symbols as in `core`. Products reach a share of the data sheet's rate that depends on chip and
format; the products of experts have few rows each, and run one after another.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from shardlab.common.machines import MACHINES
from shardlab.layout.structure import LayerKind, MatrixProduct

from .cost import ELEMENT_BYTES
from .job import Job
from .rates import RateValues

TILE_SHAPE = 128, 256  # shape of a product's output tile, which one multiprocessor computes

# Megatron's rates were fitted on A100s; another chip's are scaled by its best product's rate.
A100_MATMUL_RATE = MACHINES["a100"].matmul_fraction


def layer_matmul_seconds(job: Job, rates: RateValues, kind: LayerKind) -> float:
    """Return the seconds of a layer's products, including those of the rank's own experts.

    Every expert reads its weights, however few tokens choose it; the fullest rank sets the time.
    """
    taken = sum(shard_seconds(job, rates, one) for one in kind.matrix_products if not one.is_expert)
    if not kind.routed:
        return taken
    here = kind.routed.num_experts // job.layout.ep
    rows = job.tokens * kind.routed.top_k / here * job.layout.expert_tp / job.layout.tp
    own = [one for one in kind.matrix_products if one.is_expert]
    read = sum(ELEMENT_BYTES * one.inputs * one.outputs for one in own) / job.layout.expert_tp
    least = read / (rates.memory * job.machine.memory_bandwidth)
    # Few rows do not fill the chip.
    slow = min(1.0, rates.grouped_matmul) * rows / (rows + rates.half_rate_rows)
    each = max(least, sum(shard_seconds(job, rates, one, rows) for one in own) / slow)
    return taken + rates.expert_imbalance * here * each


def shard_seconds(
    job: Job, rates: RateValues, product: MatrixProduct, rows: float | None = None
) -> float:
    """Return the seconds of a rank's shard of a product with `rows` rows (None: all tokens)."""
    t = job.layout.expert_tp if product.is_expert else job.layout.tp
    outputs = product.outputs / (t if product.tp_dim == 0 else 1)
    return matmul_seconds(
        job, rates, outputs, product.inputs / (t if product.tp_dim == 1 else 1), rows
    )


def matmul_seconds(
    job: Job,
    rates: RateValues,
    outputs: float,
    inputs: float,
    rows: float | None = None,
    in_16_bits: bool = False,
) -> float:
    """Return the seconds of a product rows × inputs times inputs × outputs (None: a row per token).

    in_16_bits: use 16 bits, even if the job's other products have fewer.
    """
    rows = job.tokens if rows is None else rows
    taken = 2 * rows * outputs * inputs / _matmul_rate(job, rates, in_16_bits)
    if job.profile.counts_tile_waves and job.machine.sm_count:
        taken *= A100_MATMUL_RATE / (job.machine.matmul_fraction or A100_MATMUL_RATE)
        tiles = ceil(rows / TILE_SHAPE[0]) * ceil(outputs / TILE_SHAPE[1])
        taken *= ceil(tiles / job.machine.sm_count) * job.machine.sm_count / tiles
    return taken


def _matmul_rate(job: Job, rates: RateValues, in_16_bits: bool) -> float:
    machine = job.machine
    share = rates.products * (
        rates.fp4_gpus if machine.fp4 else 1.0 if machine.fp8 else rates.pre_fp8_gpus
    )
    if in_16_bits or job.flops == machine.flops:
        return cap_share(job, rates, share) * machine.flops
    return cap_share(job, rates, share * getattr(rates, job.dtype)) * job.flops


def cap_share(job: Job, rates: RateValues, share: float) -> float:
    """Cap a share, fitted on another GPU, at the data sheet's rate or the engine's factor."""
    engine = job.profile.engine_rate
    return min(share, getattr(rates, engine) if engine else 1.0)


def reformat_seconds(job: Job, rates: RateValues, kind: LayerKind) -> float:
    """Return the forward seconds of memory passes that products need beside their arithmetic.

    8-bit products cast inputs and outputs; rows are permuted into the experts' order, and back; and
    some engines add the experts' biases in passes of their own.
    """
    width = 0.0
    if job.dtype != "bf16":
        width += rates.cast_passes * _count_io_elements(kind, job.layout.tp, job.layout.expert_tp)
    if kind.routed and rates.permute_passes:
        rows = kind.routed.top_k * job.layout.expert_tp / job.layout.tp
        width += rates.permute_passes * rows * kind.routed.input_width
        if (first := kind.expert_bias_width) and job.dtype in ("bf16", "fp8"):
            given, between = job.profile.expert_bias_accesses
            width += rows * (
                given * kind.routed.input_width + between * first / job.layout.expert_tp
            )
    return memory_pass_seconds(job, rates, width)


@lru_cache(maxsize=4096)
def _count_io_elements(kind: LayerKind, tp: int, cut: int) -> float:
    """Count the numbers per token that a rank's products read and write."""
    total = 0.0
    for one in kind.matrix_products:
        t, times = tp, 1.0
        if one.is_expert and kind.routed:
            t, times = cut, kind.routed.top_k * cut / tp
        both = one.outputs / (t if one.tp_dim == 0 else 1) + one.inputs / (
            t if one.tp_dim == 1 else 1
        )
        total += times * both
    return total


def memory_pass_seconds(job: Job, rates: RateValues, width: float) -> float:
    """Return the seconds to read or write `width` numbers per token."""
    return ELEMENT_BYTES * job.tokens * width / (rates.memory * job.machine.memory_bandwidth)
