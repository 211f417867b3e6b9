"""Lesson `gemm`: its exercises accept solutions, and help with the mistakes that people make."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import each, judged
from torch.nn import functional as F

from shardlab import ranks
from shardlab.check import check


def backward(a_MK, b_Kn, grad_Mn, group, reduce="A", mean=False):
    """Of a product by columns: every rank's part of A's gradient is a summand of it."""
    grads = {"A": grad_Mn @ b_Kn.T, "B": a_MK.T @ grad_Mn}
    for name in reduce:
        dist.all_reduce(grads[name], group=group)
    if mean:
        grads["A"] /= dist.get_world_size(group)
    return grads["A"], grads["B"]


def backward_with_a_barrier(*args):
    dist.barrier(group=args[-1])
    return backward(*args)


def inner(a_Mk, b_kN, bias, group, add="after", reduce=True, mean=False):
    c_MN = a_Mk @ b_kN
    size = dist.get_world_size(group)
    if add == "before":
        c_MN += bias
    if reduce:
        dist.all_reduce(c_MN, group=group)
    if mean:
        c_MN /= size
    return c_MN + bias if add == "after" else c_MN


def two(x_MK, v_Kf, w_fN, group, gelu="between", reduce=True, mean=False):
    y_Mf = x_MK @ v_Kf
    c_MN = (F.gelu(y_Mf) if gelu == "between" else y_Mf) @ w_fN
    if reduce:
        dist.all_reduce(c_MN, group=group)
    if mean:
        c_MN /= dist.get_world_size(group)
    return F.gelu(c_MN) if gelu == "after" else c_MN


def two_with_a_gather(x_MK, v_Kf, w_fN, group):
    dist.barrier(group=group)
    return two(x_MK, v_Kf, w_fN, group)


def ring(a_mK, b_kN, group, way=1, steps=None, collect=False):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    k = len(b_kN)
    c_mN, piece = 0, b_kN
    if collect:
        pieces = [torch.empty_like(b_kN) for _ in range(size)]
        dist.all_gather(pieces, b_kN, group=group)
        return a_mK @ torch.cat(pieces)
    steps = size if steps is None else steps
    for step in range(steps):
        at = (rank - way * step) % size
        c_mN = c_mN + a_mK[:, at * k : (at + 1) * k] @ piece
        if step < size - 1 and steps > 1:
            incoming = torch.empty_like(piece)
            after, before = (rank + 1) % size, (rank - 1) % size
            ranks.exchange(piece, after, incoming, before, group).wait()
            piece = incoming
    return c_mN


def ring_home(a_mK, b_kN, group):
    """Right, and every piece goes home at the end."""
    result, size, rank = ring(a_mK, b_kN, group), dist.get_world_size(group), dist.get_rank(group)
    incoming = torch.empty_like(b_kN)
    ranks.exchange(b_kN, (rank + 1) % size, incoming, (rank - 1) % size, group).wait()
    return result


def ring_all_send_first(a_mK, b_kN, group):
    """With gloo it works."""
    rank, size, k = dist.get_rank(group), dist.get_world_size(group), len(b_kN)
    c_mN, piece = 0, b_kN
    for step in range(size):
        at = (rank - step) % size
        c_mN = c_mN + a_mK[:, at * k : (at + 1) * k] @ piece
        if step < size - 1:
            incoming = torch.empty_like(piece)
            sent = ranks.isend(piece, (rank + 1) % size, group)
            ranks.irecv(incoming, (rank - 1) % size, group).wait()
            sent.wait()
            piece = incoming
    return c_mN


def ring_stuck(a_mK, b_kN, group):
    ranks.irecv(torch.empty_like(b_kN), (dist.get_rank(group) - 1) % 2, group).wait()


def way(M, K, N, size, cut_result=False):
    m, k, n = (-(-whole // size) for whole in (M, K, N))
    held = {"rows": m * K + K * N + m * N, "columns": M * K + K * n + M * n}
    held["inner"] = M * k + k * N + (m * N if cut_result else M * N)
    return min(held, key=held.get)


C = 4 * 4096 * 11008
ANSWERS = [
    ("gemm_bytes", 1.5 * C, None),
    ("gemm_bytes", ..., "There is no answer yet"),
    ("gemm_bytes", 0.75 * C, "a reduce-scatter"),
    ("gemm_bytes", 3 * C, "naive way"),
    ("gemm_bytes", C, "the size of C"),
    ("gemm_bytes", 1.5 * 4096 * 11008, "elements"),
    ("gemm_bytes", 1.5 * 4 * 4096 * 2048, "wrong matrix"),
    ("gemm_bytes", 1.5 * C / 1e6, "in bytes"),
    ("gemm_pays", 2000, None),
    ("gemm_pays", 4000, "2 n^3 operations"),
    ("gemm_pays", 1750, "lose an eighth"),
    ("gemm_pays", 1000, "numerator"),
    ("gemm_pays", 250, "at the same time"),
    ("gemm_pays", "2000", "should be a number"),
    ("my_backward_of_columns", backward, None),
    ("my_backward_of_columns", lambda *a: ..., "returned no pair"),
    ("my_backward_of_columns", lambda *a: backward(*a, reduce=""), "a sum over all columns"),
    ("my_backward_of_columns", lambda *a: backward(*a, mean=True), "mean of the ranks' parts"),
    ("my_backward_of_columns", lambda *a: backward(*a, reduce="AB"), "used on one rank alone"),
    ("my_backward_of_columns", backward_with_a_barrier, "one is enough"),
    ("my_backward_of_columns", lambda a_MK: a_MK, "TypeError"),
    ("my_inner", inner, None),
    ("my_inner", lambda *a: inner(*a, add="before"), "The bias is in it 2 times"),
    ("my_inner", lambda *a: inner(*a, add=""), "The bias is missing"),
    ("my_inner", lambda *a: inner(*a, reduce=False), "nobody has added them up"),
    ("my_inner", lambda *a: inner(*a, add="", reduce=False), "nobody has added them up"),
    ("my_inner", lambda *a: inner(*a, mean=True), "the mean of the ranks' products"),
    ("my_inner", lambda *a: None, "returned None"),
    ("my_two_products", two, None),
    ("my_two_products", lambda *a: two(*a, reduce=False), "cut in its inner dimension"),
    ("my_two_products", lambda *a: two(*a, gelu=""), "GELU is missing"),
    ("my_two_products", lambda *a: two(*a, gelu="after"), "between the two products"),
    ("my_two_products", lambda *a: two(*a, mean=True), "mean of the ranks' parts"),
    ("my_two_products", two_with_a_gather, "one is enough"),
    ("my_ring_product", ring, None),
    ("my_ring_product", lambda *a: ring(*a, steps=1), "own piece of B"),
    ("my_ring_product", lambda *a: ring(*a, way=-1), "those of rank (r + i)"),
    ("my_ring_product", lambda *a: ring(*a, collect=True), "ranks.exchange"),
    ("my_ring_product", ring_home, "are enough"),
    ("my_ring_product", ring_all_send_first, "With nccl it hangs"),
    ("my_way", way, None),
    ("my_way", lambda *a: way(*a, cut_result=True), "as large as all of C"),
    ("my_way", lambda *a: "rows", "elements on the fullest rank"),
    ("my_way", lambda *a: 1, "allowed are"),
    ("my_way", lambda M, K: "rows", "raised TypeError"),
]


@each(ANSWERS)
def test_exercises_accept_the_solution_and_help_with_mistakes(name, answer, words):
    judged(name, answer, words)


def test_a_ring_that_waits_for_nobody_is_named():
    verdict = check(ring_stuck, "my_ring_product")
    assert not verdict.ok and "waits for what nobody sends" in verdict.message
