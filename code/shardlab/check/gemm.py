"""The exercises of lesson `gemm`. M, K, N: sizes of A_MK @ B_KN; m, k, n, f: a rank's share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardlab import count, gemm, ranks

from . import (
    Wrong,
    exercise,
    messages_of,
    number,
    refuse_a_ring_that_hangs,
    run_answer,
    same,
)

_PATIENCE = 5.0  # seconds; a right answer takes a tenth of one
# Values below 10 and sums of at most ten products in float64: rounding stays below 1e-13.
_TOLERANCE = 1e-11
_SIZES = (10, 7, 9)  # M, K, N: neither 2 nor 4 divides K and N, and 3 divides N alone


def _cut(size: int, parts: int) -> list[slice]:
    return [gemm.share(size, parts, part) for part in range(parts)]


def _matrix(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _on_ranks(
    answer: Callable[..., Any], given: list[tuple[Any, ...]]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Call answer(*given[rank], group) on each rank: the results, and what each rank sent."""

    def here(thing: Any) -> Any:
        return thing.to(ranks.device()).clone() if isinstance(thing, Tensor) else thing

    def work() -> tuple[Any, dict[str, Any]]:
        with count.sent() as sent:
            mine = map(here, given[dist.get_rank()])
            result, log = messages_of(answer, *mine, dist.group.WORLD)
        return result, {"collectives": dict(sent.collectives), "bytes": sent.bytes, "log": log}

    try:
        found = run_answer(work, len(given), timeout=_PATIENCE)
    except Wrong as wrong:
        message = str(wrong)
        if f"within {_PATIENCE:g} s" in message:
            message += "\nSomebody waits for what nobody sends, or sends what nobody receives."
        raise Wrong(message) from None
    return [result for result, _ in found], [seen for _, seen in found]


def _equal(got: list[Any], own: list[Tensor]) -> bool:
    """Whether each rank returned just its own part."""
    return all(
        isinstance(mine, Tensor)
        and mine.shape == part.shape
        and torch.allclose(mine.double(), part, rtol=0, atol=_TOLERANCE)
        for mine, part in zip(got, own, strict=True)
    )


@exercise("gemm_bytes")
def _(answer: Any) -> str:
    c = 4 * 4096 * 11008  # bytes of C
    number(
        answer,
        2 * 3 / 4 * c,
        "bytes",
        rel=0.001,
        hints={
            c * 3 / 4: "That is a reduce-scatter: afterwards each rank has a quarter of the sum.",
            3 * c: "That is the naive way, in which a rank sends all of its matrix to each other.",
            c: "That is the size of C. A rank sends pieces of it in N - 1 steps, twice.",
            2 * c: "Close, and right for very many ranks: one piece in four need not be sent.",
            2 * 3 / 4 * c / 4: "These are elements. A float32 has 4 bytes.",
            2 * 3 / 4 * 4 * 4096 * 2048: "These are bytes of the wrong matrix: what is summed has "
            "the shape of C, 4096 x 11008. Its size does not depend on the inner dimension.",
            2 * 3 / 4 * c / 1e6: "In MB it is right; the answer is asked for in bytes.",
        },
    )
    return "Right: 2 x 3/4 of the 180 MB of C. The inner dimension, 2048, does not matter."


@exercise("gemm_pays")
def _(answer: Any) -> str:
    flops, bandwidth, itemsize = 400e12, 200e9, 2
    side = itemsize * flops / (2 * bandwidth)
    number(
        answer,
        side,
        "",
        rel=0.02,
        hints={
            2 * side: "You count a multiply-add as one operation, or 4 bytes per entry: it is "
            "2 n^3 operations, and 2 bytes.",
            **dict.fromkeys(
                (side * 7 / 8, side * 8 / 7),
                "Both sides lose an eighth: 7/8 of the compute is saved, 7/8 of C is received.",
            ),
            flops / bandwidth / itemsize: "Bytes per entry belong into the numerator: the more "
            "bytes travel, the larger a product must be.",
            side / 8: "The ranks' links work at the same time, and each receives 7/8 of C.",
        },
    )
    return "Right: n = 2000, and the number of ranks cancels."


@exercise("my_backward_of_columns")
def _(answer: Callable[..., Any]) -> str:
    M, K, columns = _SIZES
    a, b, grad = _matrix(M, K, 1), _matrix(K, columns, 2), _matrix(M, columns, 11)
    for size in (3, 2, 4):
        cuts = _cut(columns, size)
        given = [(a, b[:, cut], grad[:, cut]) for cut in cuts]
        pairs, seen = _on_ranks(answer, given)
        for rank, pair in enumerate(pairs):
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise Wrong(f"Rank {rank} returned no pair: wanted is (gradient of A, of b_Kn).")
        of_a, of_b = ([pair[i] for pair in pairs] for i in (0, 1))
        own_a, own_b = (
            [grad[:, cut] @ b[:, cut].T for cut in cuts],
            [a.T @ grad[:, c] for c in cuts],
        )
        right = grad @ b.T
        if _equal(of_a, own_a):
            raise Wrong(
                f"With {size} ranks, each returned its own part of A's gradient. Every column of C "
                "used all of A, so A's gradient is a sum over all columns: over all ranks."
            )
        same(
            of_a,
            [right] * size,
            f"A's gradient on {size} ranks",
            _TOLERANCE,
            {
                "That is the mean of the ranks' parts; A's gradient is their sum.": [right / size]
                * size
            },
        )
        hints = {}
        if columns % size == 0:
            hints[
                "These are the sums over all ranks; a column of B was used on one rank alone."
            ] = [torch.stack(own_b).sum(0)] * size
        same(of_b, own_b, f"the gradient of b_Kn on {size} ranks", _TOLERANCE, hints)
        for rank, sent in enumerate(seen):
            calls = sum(times for times, _ in sent["collectives"].values())
            if calls > 1:
                raise Wrong(
                    f"The values are right. But rank {rank} called {calls} collectives, and one is "
                    "enough: the gradient of a rank's columns of B needs nothing of others."
                )
    return "Equal to one process on 2, 3 and 4 ranks, with one all-reduce, of A's gradient."


@exercise("my_inner")
def _(answer: Callable[..., Any]) -> str:
    M, K, N = _SIZES
    a, b, bias = _matrix(M, K, 3), _matrix(K, N, 4), _matrix(1, N, 5)[0]
    for size in (2, 4, 3):
        cuts = _cut(K, size)
        given = [(a[:, cut], b[cut], bias) for cut in cuts]
        got, _ = _on_ranks(answer, given)
        own = [a[:, cut] @ b[cut] for cut in cuts]
        product = a @ b
        if _equal(got, own) or _equal(got, [part + bias for part in own]):
            raise Wrong(
                f"With {size} ranks, each returned its own products: nobody has added them up."
            )
        same(
            got,
            [product + bias] * size,
            f"C + bias on {size} ranks",
            _TOLERANCE,
            {
                f"The bias is in it {size} times: every rank added it before the sum.": [
                    product + size * bias
                ]
                * size,
                "The bias is missing.": [product] * size,
                "That is the mean of the ranks' products; C is their sum.": [product / size + bias]
                * size,
            },
        )
    return "Equal to A @ B + bias on 2, 3 and 4 ranks, and the bias is in it once."


@exercise("my_two_products")
def _(answer: Callable[..., Any]) -> str:
    M, K, N = _SIZES
    width = 11
    x, v, w = _matrix(M, K, 6), _matrix(K, width, 7), _matrix(width, N, 8)
    for size in (2, 4, 3):
        cuts = _cut(width, size)
        given = [(x, v[:, cut], w[cut]) for cut in cuts]
        got, seen = _on_ranks(answer, given)
        right = F.gelu(x @ v) @ w
        own = [F.gelu(x @ v[:, cut]) @ w[cut] for cut in cuts]
        if _equal(got, own):
            raise Wrong(
                f"With {size} ranks, each returned its own part of the sum over f: the second "
                "product is cut in its inner dimension, so its parts have to be added up."
            )
        same(
            got,
            [right] * size,
            f"gelu(X V) W on {size} ranks",
            _TOLERANCE,
            {
                "GELU is missing.": [(x @ v) @ w] * size,
                "GELU came after the sum; it belongs between the two products.": [
                    F.gelu((x @ v) @ w)
                ]
                * size,
                "That is the mean of the ranks' parts; the result is their sum.": [right / size]
                * size,
            },
        )
        for rank, sent in enumerate(seen):
            calls = sum(times for times, _ in sent["collectives"].values())
            if calls > 1:
                names = " and ".join(sent["collectives"])
                raise Wrong(
                    f"The values are right. But rank {rank} called {calls} collectives ({names}), "
                    "and one is enough: GELU works on each entry by itself, so nobody needs the "
                    "columns of others between the two products."
                )
    return "Equal to one process on 2, 3 and 4 ranks, with one all-reduce for two products."


@exercise("my_ring_product")
def _(answer: Callable[..., Any]) -> str:
    M, K, N = 8, 12, 5  # 2, 3 and 4 divide K
    a, b = _matrix(M, K, 9), _matrix(K, N, 10)
    for size in (2, 4, 3):
        rows, inner = _cut(M, size), _cut(K, size)
        given = [(a[row], b[cut]) for row, cut in zip(rows, inner, strict=True)]
        got, seen = _on_ranks(answer, given)
        right = [a[row] @ b for row in rows]
        own, turned = [], []
        for rank, row in enumerate(rows):
            own.append(a[row][:, inner[rank]] @ b[inner[rank]])
            # Whoever takes the columns of A the other way round than B's pieces arrive.
            pairs = [(inner[(rank + i) % size], inner[(rank - i) % size]) for i in range(size)]
            turned.append(sum(a[row][:, left] @ b[piece] for left, piece in pairs))
        hints = {
            "That is the product with the rank's own piece of B; the others' never arrived.": own
        }
        if size > 2:  # on two ranks both ways round are the same
            hints[
                "In step i the piece of rank (r - i) is here when pieces go to the next rank; the "
                "columns of A were those of rank (r + i)."
            ] = turned
        same(got, right, f"its rows of C, with {size} ranks,", _TOLERANCE, hints)
        piece = b[inner[0]].numel() * b.element_size()
        for rank, sent in enumerate(seen):
            if sent["collectives"]:
                name = next(iter(sent["collectives"]))
                raise Wrong(
                    f"The values are right. But rank {rank} called {name}: let the pieces of B go "
                    "around by ranks.exchange, so that no rank holds all of B."
                )
            if sent["bytes"] > (size - 1) * piece:
                raise Wrong(
                    f"The values are right. But with {size} ranks, rank {rank} sends "
                    f"{sent['bytes']} bytes, and {(size - 1) * piece} are enough: after N - 1 "
                    "steps everybody has seen every piece."
                )
        refuse_a_ring_that_hangs([sent["log"] for sent in seen])
    return "Right on 2, 3 and 4 ranks: the bytes of an all-gather, and never all of B on a rank."


# M, K, N, ranks
_CHOICES = ((8192, 4096, 4096, 4), (4096, 4096, 16384, 4), (1024, 65536, 1024, 8))
_CHOICES += ((512, 512, 512, 1), (100_000, 64, 64, 16), (64, 64, 100_000, 16))
_CHOICES += ((1001, 30_011, 1003, 7),)


def _held(M: int, K: int, N: int, size: int, cut_result: bool = False) -> dict[str, int]:
    """Elements of A, B and C on the rank with the most."""
    m, k, n = (-(-whole // size) for whole in (M, K, N))
    inner = M * k + k * N + (m * N if cut_result else M * N)
    return {"rows": m * K + K * N + m * N, "columns": M * K + K * n + M * n, "inner": inner}


@exercise("my_way")
def _(answer: Callable[..., Any]) -> str:
    for case in _CHOICES:
        held = _held(*case)
        asked = f"my_way{case}"
        try:
            got = answer(*case)
        except Exception as error:
            raise Wrong(f"{asked} raised {type(error).__name__}: {error}") from None
        if got not in held:
            raise Wrong(f"{asked} returned {got!r}; allowed are 'rows', 'columns' and 'inner'.")
        least = min(held.values())
        if held[got] == least:
            continue
        better = next(way for way, size in held.items() if size == least)
        words = (
            f"{asked} returned {got!r}, with {held[got]:,} elements on the fullest rank; "
            f"{better!r} has {least:,}."
        )
        forgotten = _held(*case, cut_result=True)
        if got == "inner" and forgotten[got] == min(forgotten.values()):
            words += " By the inner dimension every rank's result is as large as all of C."
        raise Wrong(words)
    return f"Right for all {len(_CHOICES)} products: the largest matrix is the one to cut."
