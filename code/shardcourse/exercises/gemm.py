"""Exercises of the lesson `gemm`. M, K, N: sizes of A_MK @ B_KN; m, k, n, f: a rank's share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardcourse.exercises.forms import (
    Output,
    Trial,
    add_cases,
    add_number,
    add_trials,
    check_nccl_deadlock,
    check_received_freed,
    limit_bytes,
    limit_calls,
)
from shardlab import gemm

# Values below 10 and sums of at most thirty products in float64: rounding stays below 1e-12.
_TOLERANCE = 1e-11
_SIZES = (10, 7, 9)  # M, K, N: neither 2 nor 4 divides K and N, and 3 divides N alone


def _split_range(size: int, parts: int) -> list[slice]:
    return [gemm.shard_slice(size, parts, part) for part in range(parts)]


def _make_matrix(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


_C = 4 * 4096 * 11008  # bytes of C
add_number("gemm_bytes", 2 * 3 / 4 * _C, "bytes", rel_tol=0.001,
       success="Right: 2 x 3/4 of the 180 MB of C. The inner dimension, 2048, does not matter.",
       hints={
    _C * 3 / 4: "That is a reduce-scatter: afterwards each rank has a quarter of the sum.",
    3 * _C: "That is the naive way, in which a rank sends all of its matrix to each other.",
})  # fmt: skip

_FLOPS, _BANDWIDTH, _SIDE = 400e12, 200e9, 2000
add_number("gemm_pays", _SIDE, rel_tol=0.02,
       success="Right: n = 2000, and the number of ranks cancels.", hints={
    2 * _SIDE: "You count a multiply-add as one operation, or 4 bytes per entry: it is 2 n^3 "
    "operations, and 2 bytes.",
    _SIDE * 7 / 8: "Both sides lose an eighth: 7/8 of the compute is saved, "
    "7/8 of C is received.",
})  # fmt: skip


@add_trials(
    "my_backward_of_columns",
    (3, 2, 4),
    rules=[limit_calls(1, "the gradient of a rank's columns of B needs no data of other ranks.")],
    success="Equal to one process on 2, 3 and 4 ranks, with one all-reduce, of A's gradient.",
)
def _(size: int) -> Trial:
    M, K, columns = _SIZES
    a, b, grad = _make_matrix(M, K, 1), _make_matrix(K, columns, 2), _make_matrix(M, columns, 11)
    cuts, right = _split_range(columns, size), grad @ b.T
    own = [a.T @ grad[:, cut] for cut in cuts]
    of_a = {
        "Each rank has its own part. Every column of C used all of A, so A's gradient is a sum "
        "over all columns: over all ranks.": [grad[:, cut] @ b[:, cut].T for cut in cuts]
    }
    parts = [
        Output(f"A's gradient on {size} ranks", right, of_a, _TOLERANCE),
        Output("the gradient of b_Kn", own, {}, _TOLERANCE),
    ]
    return Trial(parts, [(a, b[:, cut], grad[:, cut]) for cut in cuts])


@add_trials(
    "my_inner",
    (2, 4, 3),
    success="Right: A @ B + bias on 2, 3 and 4 ranks, with the bias added once.",
)
def _(size: int) -> Trial:
    M, K, N = _SIZES
    a, b, bias = _make_matrix(M, K, 3), _make_matrix(K, N, 4), _make_matrix(1, N, 5)[0]
    cuts, product = _split_range(K, size), a @ b
    own = [a[:, cut] @ b[cut] for cut in cuts]
    mistakes = {
        "Each rank has its own products: they have not been added up.": own,
        f"The bias is in it {size} times: every rank added it before the sum.": (
            product + size * bias
        ),
    }
    part = Output(f"C + bias on {size} ranks", product + bias, mistakes, _TOLERANCE)
    return Trial([part], [(a[:, cut], b[cut], bias) for cut in cuts])


@add_trials(
    "my_two_products",
    (2, 4, 3),
    rules=[
        limit_calls(
            1,
            "GELU works on each entry by itself, so no rank needs the columns of others between "
            "the two products.",
        )
    ],
    success="Equal to one process on 2, 3 and 4 ranks, with one all-reduce for two products.",
)
def _(size: int) -> Trial:
    (M, K, N), width = _SIZES, 11
    x, v, w = _make_matrix(M, K, 6), _make_matrix(K, width, 7), _make_matrix(width, N, 8)
    cuts, right = _split_range(width, size), F.gelu(x @ v) @ w
    mistakes = {
        "Each rank has its own part of the sum over f: the second product is cut in its inner "
        "dimension, so its parts have to be added up.": [
            F.gelu(x @ v[:, cut]) @ w[cut] for cut in cuts
        ],
        "GELU came after the sum; it belongs between the two products.": F.gelu((x @ v) @ w),
    }
    part = Output(f"gelu(X V) W on {size} ranks", right, mistakes, _TOLERANCE)
    return Trial([part], [(x, v[:, cut], w[cut]) for cut in cuts])


_RING_SIZES = (8, 30, 5)  # M, K, N: 2, 3 and 5 divide K


@add_trials(
    "my_ring_product",
    (2, 3, 5),
    rules=[
        limit_calls(0, "pass pieces of B around with ranks.exchange, so that no rank has all."),
        limit_bytes(
            lambda n: (n - 1) * 30 // n * 5 * 8,
            "after N - 1 steps every rank has seen every piece.",
        ),
        check_nccl_deadlock,
        check_received_freed,
    ],
    success="Right on 2, 3 and 5 ranks: the bytes of an all-gather, and never all of B on a rank.",
)
def _(size: int) -> Trial:
    M, K, N = _RING_SIZES
    a, b = _make_matrix(M, K, 9), _make_matrix(K, N, 10)
    rows, inner = _split_range(M, size), _split_range(K, size)

    def multiply_shards(rank: int, direction: int) -> Tensor:
        """Return the product summed over all turns, with A's columns taken in direction `way`."""
        turns = range(size)
        pairs = [(inner[(rank - direction * i) % size], inner[(rank - i) % size]) for i in turns]
        return sum(a[rows[rank]][:, left] @ b[piece] for left, piece in pairs)

    every = range(size)
    mistakes = {
        "In step i the piece of rank (r - i) is here when pieces go to the next rank; the columns "
        "of A were those of rank (r + i).": [multiply_shards(rank, -1) for rank in every]
    }
    right = [multiply_shards(rank, 1) for rank in every]
    part = Output(f"its rows of C, with {size} ranks,", right, mistakes, _TOLERANCE)
    return Trial([part], [(a[row], b[cut]) for row, cut in zip(rows, inner, strict=True)])


def _count_elements(M: int, K: int, N: int, size: int, cut_result: bool = False) -> dict[str, int]:
    """Return the elements of A, B and C on the rank that holds most, for each way to cut."""
    m, k, n = (-(-full // size) for full in (M, K, N))
    inner = M * k + k * N + (m * N if cut_result else M * N)
    return {"rows": m * K + K * N + m * N, "columns": M * K + K * n + M * n, "inner": inner}


def _find_best_cuts(*case: int, cut_result: bool = False) -> dict[str, int]:
    held = _count_elements(*case, cut_result)
    return {direction: size for direction, size in held.items() if size == min(held.values())}


# M, K, N, ranks
_PRODUCTS = ((8192, 4096, 4096, 4), (4096, 4096, 16384, 4), (1024, 65536, 1024, 8))
_PRODUCTS += ((512, 512, 512, 1), (100_000, 64, 64, 16), (64, 64, 100_000, 16))
_PRODUCTS += ((1001, 30_011, 1003, 7), (2048, 4096, 1024, 2), (4096, 1024, 1024, 2), (9, 9, 8, 8))
add_cases(
    "my_way",
    _PRODUCTS,
    _find_best_cuts,
    mistakes={
        "By the inner dimension every rank's result is as large as all of C.": lambda *case: (
            _find_best_cuts(*case, cut_result=True)
        )
    },
    equal=lambda got, want: got in want,
    success="Right for all 10 products: the smallest of the matrices is the one to keep whole.",
)
