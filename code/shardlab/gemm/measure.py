"""Measured compute and link rates of a group of ranks: the inputs of `cost.predict_seconds`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as Group

from shardlab import ranks
from shardlab.common import gpu
from shardlab.common.arguments import check_one_of
from shardlab.measure.count import read_clock, speed
from shardlab.ranks import check_group
from shardlab.ranks.torch_compat import all_gather_single

from .core import SCHEMES_1D, shard_sizes
from .cost import Machine


def time_on_group(
    call: Callable[[], Any],
    group: Group,
    repeats: int = 5,
    pick: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Time `call` until the last rank has finished it; return the seconds, equal on every rank.

    Collective. Runs one warm-up call, and a barrier before each repeat. pick: reduces the repeats'
    seconds to one number; use `min` for the machine's best rate.
    """
    check_group(group)
    times = []
    for _ in range(repeats + 1):
        dist.barrier(group=group)
        begin = read_clock(ranks.device())
        call()
        times.append(read_clock(ranks.device()) - begin)
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=_get_wire_device(group))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)  # [repeats]
    return pick(slowest.tolist())


def _get_wire_device(group: Group) -> torch.device:
    return ranks.device() if gpu.is_gpu_backend(dist.get_backend(group)) else torch.device("cpu")


def measure_machine(
    group: Group,
    device: torch.device | None = None,
    side: int | None = None,
    size: int = 2**22,
    repeats: int = 5,
) -> Machine:
    """Measure a rank's compute rate while all ranks compute, and the link of `group`.

    Collective, with equal results on every rank: the slowest rank's time in the fastest of
    `repeats`, since other work on the machine only adds time. Compute: a product of square float32
    matrices of `side`, on all ranks at once. Link: an all-gather of few bytes, and one of `size`
    bytes in all, which take (t - 1)(latency + bytes / t / bandwidth) seconds each. With one rank
    there is no link: latency 0, infinite bandwidth.
    """
    _, number = check_group(group)
    device = ranks.device() if device is None else device
    side = (8192 if gpu.is_gpu(device) else 768) if side is None else side
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    product = time_on_group(lambda: a @ b, group, repeats, min)  # [side, side] @ [side, side]
    flops = 2 * side**3 / product
    if number == 1:
        return Machine(flops, 0.0, float("inf"))

    def time_hop(numbers: int) -> float:  # seconds from one rank to the next
        piece = torch.ones(numbers, device=device)
        all_pieces = torch.empty(number * numbers, device=device)
        gather = partial(all_gather_single, all_pieces, piece, group=group)
        return time_on_group(gather, group, repeats, min) / (number - 1)

    small, large = 1, max(2, size // 4 // number)  # 4-byte elements on each rank
    short, long = time_hop(small), time_hop(large)
    # On a busy machine the large message may seem faster than the small one: bound the rate.
    per_byte = max(long - short, 1e-3 * long) / (4 * (large - small))
    return Machine(flops, max(0.0, short - 4 * small * per_byte), 1 / per_byte)


@dataclass(frozen=True)
class ShardTiming:
    """The product that one of `degree` ranks would compute, and its measured speed."""

    degree: int
    M: int
    N: int
    K: int
    seconds: float
    flops: float  # FLOP/s


def measure_shard_throughput(
    M: int,
    N: int,
    K: int,
    degrees: Sequence[int] = (1, 2, 4, 8, 16),
    scheme: str = "columns",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    repeats: int = 5,
) -> list[ShardTiming]:
    """Time the largest shard of the product M x K times K x N for each degree, on one device.

    scheme: "rows", "columns" or "inner". No other ranks are needed: this process computes one
    rank's shard. Kernels are slower on thin matrices than on large ones, so the rate falls as
    degrees grow. Returns the best of `repeats`.
    """
    check_one_of(SCHEMES_1D, scheme=scheme)
    device = ranks.device() if device is None else device
    found = []
    for degree in degrees:
        full = {"rows": M, "columns": N, "inner": K}
        full[scheme] = shard_sizes(full[scheme], degree)[0]
        m, n, k = full.values()
        seconds = _time_product(m, n, k, dtype, device, repeats)
        found.append(ShardTiming(degree, m, n, k, seconds, 2 * m * n * k / seconds))
    return found


def _time_product(
    M: int, N: int, K: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> float:
    """Return the seconds of one product, averaged over enough runs for the clock's resolution."""
    a, b = torch.randn(M, K, device=device).to(dtype), torch.randn(K, N, device=device).to(dtype)
    c = a.new_empty(M, N)

    def run_products(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b, out=c)  # [M, K] @ [K, N]

    once = speed.measure_seconds(partial(run_products, 1), device, 1)
    times = max(1, round(0.005 / max(once, 1e-7)))
    return speed.measure_seconds(partial(run_products, times), device, repeats) / times
