"""Predicted cost of each scheme to shard a product: bytes held, bytes sent, seconds.

C_MN = A_MK @ B_KN on t ranks, letters as in `core`, e bytes an element, S = M N e bytes of C.

    scheme   a rank holds, of A, B, C           all t ranks together send
    rows     MK/t, KN, MN/t; MN with all of C   nothing; t (t - 1) ceil(M/t) N e for all of C
    columns  MK, KN/t, MN/t; MN with all of C   nothing; t (t - 1) M ceil(N/t) e for all of C
    inner    MK/t, KN/t, MN                     (t - 1) S for its rows; 2 (t - 1) S for all of C
    summa    MK/t, KN/t, MN/t                   ((q - 1) MK + (p - 1) KN) e, on p x q ranks

Bytes sent are those of ring algorithms, and of trees for broadcasts (Chan et al., CCPE 19 (2007)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardlab.common.arguments import check_one_of
from shardlab.measure.link import estimate_ring_seconds

from .core import SCHEMES_1D, shard_sizes, split_panels

SCHEMES = (*SCHEMES_1D, "summa")


@dataclass(frozen=True)
class Cost:
    """One rank's bytes and floating-point operations; `wire_bytes` is of all ranks together."""

    flops: int  # a multiplication and an addition for each term of each sum
    a_bytes: int  # of its shard of A
    b_bytes: int
    c_bytes: int  # of its part of C in the end
    peak_bytes: int  # of the shards and the communication buffers
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    # as in `count.record_traffic`: name -> (number of calls, bytes of the input tensors)
    wire_bytes: int = 0  # sent by all ranks together


def choose_grid_shape(ranks: int) -> tuple[int, int]:
    """Return rows and columns of the grid of `ranks` that is nearest to a square: 6 is 2 x 3."""
    rows = max(p for p in range(1, math.isqrt(ranks) + 1) if ranks % p == 0)
    return rows, ranks // rows


def predict_cost(
    scheme: str,
    M: int,
    N: int,
    K: int,
    ranks: int,
    itemsize: int = 4,
    full: bool = True,
    rank: int = 0,
    shape: tuple[int, int] | None = None,
    width: int | None = None,
) -> Cost:
    """Return the exact cost for `rank` of the product of M x K and K x N on `ranks` ranks.

    scheme: "rows", "columns", "inner" or "summa"; on one rank all are the plain product. full:
    every rank gets all of C ("summa" leaves C in blocks: pass False). shape: of SUMMA's grid, by
    default `choose_grid_shape`. width: of its panels. `peak_bytes` is for CPU ranks with gloo.
    """
    check_one_of(SCHEMES, scheme=scheme)
    if scheme == "summa":
        if full:
            raise ValueError("full=True: must be False with scheme='summa': it keeps C in blocks")
        return _predict_summa(M, N, K, shape or choose_grid_shape(ranks), itemsize, rank, width)
    full_sizes = {"rows": M, "columns": N, "inner": K}
    cut = full_sizes[scheme]
    own, longest = shard_sizes(cut, ranks)[rank], shard_sizes(cut, ranks)[0]
    m, n, k = (own if scheme == name else size for name, size in full_sizes.items())
    a, b, c = (x * itemsize for x in (m * k, k * n, m * n))
    S = M * N * itemsize
    flops, held = 2 * m * n * k, a + b + c
    if ranks == 1 or (scheme != "inner" and not full):
        return Cost(flops, a, b, c, held)
    if scheme == "inner" and full:
        calls = {"all_reduce": (1, S)}
        return Cost(flops, a, b, S, held, calls, 2 * (ranks - 1) * S)
    if scheme == "inner":
        mine = shard_sizes(M, ranks)[rank] * N * itemsize
        calls = {"all_to_all_single": (1, S)}  # a reduce-scatter: see `multiply_inner`
        return Cost(flops, a, b, mine, held + (ranks + 1) * mine, calls, (ranks - 1) * S)
    piece = longest * S // cut
    padded = piece if own < longest else 0
    copied = S if scheme == "columns" or cut % ranks else 0  # a copy of the all-gather's output
    calls = {"all_gather_into_tensor": (1, piece)}
    held += padded + ranks * piece + copied
    return Cost(flops, a, b, S, held, calls, ranks * (ranks - 1) * piece)


def _predict_summa(
    M: int, N: int, K: int, shape: tuple[int, int], itemsize: int, rank: int, width: int | None
) -> Cost:
    rows, columns = shape
    row, column = divmod(rank, columns)
    m, n = shard_sizes(M, rows)[row], shard_sizes(N, columns)[column]
    a, b = m * shard_sizes(K, columns)[column] * itemsize, shard_sizes(K, rows)[row] * n * itemsize
    c = m * n * itemsize
    steps = split_panels(K, rows, columns, width)
    widest = max(step.end - step.begin for step in steps)
    travels = (m if columns > 1 else 0) + (n if rows > 1 else 0)  # elements per unit of width
    room = min(2, len(steps)) * widest * travels * itemsize
    calls = len(steps) * ((columns > 1) + (rows > 1))
    broadcasts = {"broadcast": (calls, travels * K * itemsize)} if calls else {}
    wire = ((columns - 1) * M * K + (rows - 1) * K * N) * itemsize
    return Cost(2 * m * n * K, a, b, c, a + b + c + room, broadcasts, wire)


class MemoryBudgetError(MemoryError):
    """Error for a computation that needs more bytes than its memory budget."""


def check_budget(needed: int, budget: int, what: str = "the product") -> None:
    """Raise OverBudget if `what` needs more than `budget` bytes; call it before allocating."""
    if needed > budget:
        raise MemoryBudgetError(
            f"{what} needs {needed / 1e6:,.1f} MB, which is {(needed - budget) / 1e6:,.1f} MB more "
            f"than the budget of {budget / 1e6:,.1f} MB"
        )


@dataclass(frozen=True)
class Machine:
    """The rates of a rank's compute and of its link, as `measure_machine` returns them."""

    flops: float  # FLOP/s of one rank, while all of them compute
    latency: float  # alpha: seconds per message
    bandwidth: float  # 1 / beta: bytes per second and direction


@dataclass(frozen=True)
class Seconds:
    """Predicted seconds of the rank with the largest share."""

    compute: float
    communicate: float  # communication that is not overlapped with compute

    @property
    def total(self) -> float:
        """Seconds from start to end."""
        return self.compute + self.communicate


def predict_seconds(
    scheme: str,
    M: int,
    N: int,
    K: int,
    ranks: int,
    machine: Machine,
    itemsize: int = 4,
    full: bool = True,
    shape: tuple[int, int] | None = None,
    width: int | None = None,
) -> Seconds:
    """Return the predicted seconds of the product; arguments as in `predict_cost`.

    Compute runs at the machine's rate, whatever the shape of a shard; collectives take
    `link.estimate_ring_seconds`. In SUMMA, a rank's row and column have one link each.
    """
    cost = predict_cost(scheme, M, N, K, ranks, itemsize, full, 0, shape, width)
    compute = cost.flops / machine.flops
    link = machine.latency, machine.bandwidth
    if scheme == "summa":
        return _simulate_summa(M, N, K, shape or choose_grid_shape(ranks), machine, itemsize, width)
    total = 0.0
    for name, (_, size) in cost.collectives.items():
        operation = {"all_gather_into_tensor": "all_gather", "all_to_all_single": "all_to_all"}
        bytes_in_all = size * ranks if name == "all_gather_into_tensor" else size
        total += estimate_ring_seconds(operation.get(name, name), bytes_in_all, ranks, *link)
    return Seconds(compute, total)


def _simulate_summa(
    M: int,
    N: int,
    K: int,
    shape: tuple[int, int],
    machine: Machine,
    itemsize: int,
    width: int | None,
) -> Seconds:
    """Simulate SUMMA step by step: the next panel is sent when the current product starts."""
    rows, columns = shape
    m, n = shard_sizes(M, rows)[0], shard_sizes(N, columns)[0]
    link = machine.latency, machine.bandwidth
    widths = [step.end - step.begin for step in split_panels(K, rows, columns, width)]

    def get_broadcast_seconds(w: int) -> float:
        along = estimate_ring_seconds("broadcast", m * w * itemsize, columns, *link)
        return max(along, estimate_ring_seconds("broadcast", w * n * itemsize, rows, *link))

    now, arrival = 0.0, get_broadcast_seconds(widths[0])
    for number, w in enumerate(widths):
        here = arrival
        if number + 1 < len(widths):
            arrival = max(now, here) + get_broadcast_seconds(widths[number + 1])
        now = max(now, here) + 2 * m * n * w / machine.flops
    compute = 2 * m * n * K / machine.flops
    return Seconds(compute, now - compute)


def find_break_even_side(
    scheme: str, ranks: int, machine: Machine, itemsize: int = 4, full: bool = True
) -> int | None:
    """Return the side of square matrices from which `ranks` ranks are faster than one.

    Only multiples of `ranks` are tried, where shards are equal. The compute time saved grows with
    the side's cube, the bytes sent with its square: larger matrices pay, too. None: none to 2^20.
    """

    def is_faster(step: int) -> bool:
        n = step * ranks
        seconds = [predict_seconds(scheme, n, n, n, r, machine, itemsize, full) for r in (1, ranks)]
        return seconds[1].total < seconds[0].total

    high = 1
    while not is_faster(high):
        if high * ranks > 2**20:
            return None
        high *= 2
    low = high // 2  # not faster, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return high * ranks
