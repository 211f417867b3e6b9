"""Exercises of the lesson `gemm`. M, K, N: sizes of A_MK @ B_KN; m, k, n, f: a rank's share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardcourse.exercises.forms import (
    Part,
    Trial,
    bytes_at_most,
    calls_at_most,
    cases,
    nobody_waits,
    number,
    on_ranks,
)
from shardlab import gemm

# Values below 10 and sums of at most ten products in float64: rounding stays below 1e-13.
_TOLERANCE = 1e-11
_SIZES = (10, 7, 9)  # M, K, N: neither 2 nor 4 divides K and N, and 3 divides N alone


def _cut(size: int, parts: int) -> list[slice]:
    return [gemm.shard_slice(size, parts, part) for part in range(parts)]


def _matrix(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


_C = 4 * 4096 * 11008  # bytes of C
number("gemm_bytes", 2 * 3 / 4 * _C, "bytes", rel=0.001,
       says="Right: 2 x 3/4 of the 180 MB of C. The inner dimension, 2048, does not matter.",
       wrong={
    _C * 3 / 4: "That is a reduce-scatter: afterwards each rank has a quarter of the sum.",
    3 * _C: "That is the naive way, in which a rank sends all of its matrix to each other.",
})  # fmt: skip

_FLOPS, _BANDWIDTH, _SIDE = 400e12, 200e9, 2000
number("gemm_pays", _SIDE, rel=0.02, says="Right: n = 2000, and the number of ranks cancels.",
       wrong={
    2 * _SIDE: "You count a multiply-add as one operation, or 4 bytes per entry: it is 2 n^3 "
    "operations, and 2 bytes.",
    _SIDE * 7 / 8: "Both sides lose an eighth: 7/8 of the compute is saved, 7/8 of C is received.",
})  # fmt: skip


@on_ranks(
    "my_backward_of_columns",
    (3, 2, 4),
    rules=[calls_at_most(1, "the gradient of a rank's columns of B needs nothing of other ranks.")],
    says="Equal to one process on 2, 3 and 4 ranks, with one all-reduce, of A's gradient.",
)
def _(size: int) -> Trial:
    M, K, columns = _SIZES
    a, b, grad = _matrix(M, K, 1), _matrix(K, columns, 2), _matrix(M, columns, 11)
    cuts, right = _cut(columns, size), grad @ b.T
    own = [a.T @ grad[:, cut] for cut in cuts]
    of_a = {
        "Each rank has its own part. Every column of C used all of A, so A's gradient is a sum "
        "over all columns: over all ranks.": [grad[:, cut] @ b[:, cut].T for cut in cuts],
    }
    parts = [
        Part(f"A's gradient on {size} ranks", right, of_a, _TOLERANCE),
        Part("the gradient of b_Kn", own, {}, _TOLERANCE),
    ]
    return Trial(parts, [(a, b[:, cut], grad[:, cut]) for cut in cuts])


@on_ranks(
    "my_inner",
    (2, 4, 3),
    says="Equal to A @ B + bias on 2, 3 and 4 ranks, and the bias is in it once.",
)
def _(size: int) -> Trial:
    M, K, N = _SIZES
    a, b, bias = _matrix(M, K, 3), _matrix(K, N, 4), _matrix(1, N, 5)[0]
    cuts, product = _cut(K, size), a @ b
    own = [a[:, cut] @ b[cut] for cut in cuts]
    mistakes = {
        "Each rank has its own products: nobody has added them up.": own,
        f"The bias is in it {size} times: every rank added it before the sum.": (
            product + size * bias
        ),
    }
    part = Part(f"C + bias on {size} ranks", product + bias, mistakes, _TOLERANCE)
    return Trial([part], [(a[:, cut], b[cut], bias) for cut in cuts])


@on_ranks(
    "my_two_products",
    (2, 4, 3),
    rules=[
        calls_at_most(
            1,
            "GELU works on each entry by itself, so nobody needs the columns of others between "
            "the two products.",
        )
    ],
    says="Equal to one process on 2, 3 and 4 ranks, with one all-reduce for two products.",
)
def _(size: int) -> Trial:
    (M, K, N), width = _SIZES, 11
    x, v, w = _matrix(M, K, 6), _matrix(K, width, 7), _matrix(width, N, 8)
    cuts, right = _cut(width, size), F.gelu(x @ v) @ w
    mistakes = {
        "Each rank has its own part of the sum over f: the second product is cut in its inner "
        "dimension, so its parts have to be added up.": [
            F.gelu(x @ v[:, cut]) @ w[cut] for cut in cuts
        ],
        "GELU came after the sum; it belongs between the two products.": F.gelu((x @ v) @ w),
    }
    part = Part(f"gelu(X V) W on {size} ranks", right, mistakes, _TOLERANCE)
    return Trial([part], [(x, v[:, cut], w[cut]) for cut in cuts])


_RING = (8, 12, 5)  # M, K, N: 2, 3 and 4 divide K


@on_ranks(
    "my_ring_product",
    (2, 4, 3),
    rules=[
        calls_at_most(0, "let pieces of B go around by ranks.exchange, so that no rank has all."),
        bytes_at_most(
            lambda n: (n - 1) * 12 // n * 5 * 8,
            "after N - 1 steps everybody has seen every piece.",
        ),
        nobody_waits,
    ],
    says="Right on 2, 3 and 4 ranks: the bytes of an all-gather, and never all of B on a rank.",
)
def _(size: int) -> Trial:
    M, K, N = _RING
    a, b = _matrix(M, K, 9), _matrix(K, N, 10)
    rows, inner = _cut(M, size), _cut(K, size)

    def multiplied(rank: int, way: int) -> Tensor:
        """Return the product summed over all turns, with A's columns taken in direction `way`."""
        pairs = [(inner[(rank - way * i) % size], inner[(rank - i) % size]) for i in range(size)]
        return sum(a[rows[rank]][:, left] @ b[piece] for left, piece in pairs)

    every = range(size)
    mistakes = {
        "In step i the piece of rank (r - i) is here when pieces go to the next rank; the columns "
        "of A were those of rank (r + i).": [multiplied(rank, -1) for rank in every],
    }
    right = [multiplied(rank, 1) for rank in every]
    part = Part(f"its rows of C, with {size} ranks,", right, mistakes, _TOLERANCE)
    return Trial([part], [(a[row], b[cut]) for row, cut in zip(rows, inner, strict=True)])


def _held(M: int, K: int, N: int, size: int, cut_result: bool = False) -> dict[str, int]:
    """Return the elements of A, B and C on the rank that holds most, for each way to cut."""
    m, k, n = (-(-full // size) for full in (M, K, N))
    inner = M * k + k * N + (m * N if cut_result else M * N)
    return {"rows": m * K + K * N + m * N, "columns": M * K + K * n + M * n, "inner": inner}


def _least(*case: int, cut_result: bool = False) -> dict[str, int]:
    held = _held(*case, cut_result)
    return {way: size for way, size in held.items() if size == min(held.values())}


# M, K, N, ranks
_PRODUCTS = ((8192, 4096, 4096, 4), (4096, 4096, 16384, 4), (1024, 65536, 1024, 8))
_PRODUCTS += ((512, 512, 512, 1), (100_000, 64, 64, 16), (64, 64, 100_000, 16))
_PRODUCTS += ((1001, 30_011, 1003, 7),)
cases(
    "my_way",
    _PRODUCTS,
    _least,
    mistakes={
        "By the inner dimension every rank's result is as large as all of C.": lambda *case: _least(
            *case, cut_result=True
        )
    },
    equal=lambda got, want: got in want,
    says="Right for all 7 products: the largest matrix is the one to cut.",
)
