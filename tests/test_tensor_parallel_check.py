"""Lesson `tensor_parallel`: its exercises accept solutions, and help with common mistakes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import each, judged
from torch.nn import functional as F

from shardlab import memory
from shardlab import tensor_parallel as tp
from shardlab.layout import Layout


def shards(up_FH, up_bias_F, down_HF, rank, size, dim=0, mine=None):
    share = up_FH.shape[dim] // size
    own = slice(rank * share, (rank + 1) * share)
    down = slice(mine * share, (mine + 1) * share) if mine is not None else own
    if dim:
        return up_FH[:, own], up_bias_F, down_HF[own]
    return up_FH[own], up_bias_F[own], down_HF[:, down]


def dealt(up_FH, up_bias_F, down_HF, rank, size):
    """Every size-th column: another cut, and a right one."""
    return up_FH[rank::size], up_bias_F[rank::size], down_HF[:, rank::size]


def gated(x, gate, up, down, bias, group, enter=tp.copy_to, leave=tp.reduce_from, **changes):
    xs = [x, x] if enter is None else [enter(x, group)] * 2
    if changes.get("twice"):
        xs = [tp.copy_to(x, group), tp.copy_to(x, group)]
    y = (F.silu(xs[0] @ gate.T) * (xs[1] @ up.T)) @ down.T
    y = y + bias if changes.get("before") else y
    y = leave(y, group) if leave else y
    y = y / dist.get_world_size(group) if changes.get("mean") else y
    return y if changes.get("before") or changes.get("none") else y + bias


class Sum(torch.autograd.Function):
    """A sum whose gradient is summed as well."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed(x.clone(), group)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient.clone(), ctx.group), None


def summed(tensor, group):
    dist.all_reduce(tensor, group=group)
    return tensor


class Mean(torch.autograd.Function):
    """Hands x on, and adds up and divides what comes back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient / ctx.group.size(), ctx.group), None


mean_of = Mean.apply


def kv_heads(heads, kv_heads, rank, size, everyone=False, alone=False, cut=False):
    def held(r):
        share = kv_heads // size
        if cut:
            return list(range(r * share, (r + 1) * share))
        return sorted(
            {head * kv_heads // heads for head in range(heads) if head * size // heads == r}
        )

    copies = [r for r in range(size) if everyone or held(r) == held(rank)]
    return held(rank), [rank] if alone else copies


def greedy(logits, group, offset=True, how="min", gather=False):
    size, share = dist.get_world_size(group), logits.shape[-1]
    if gather:
        parts = [torch.empty_like(logits) for _ in range(size)]
        dist.all_gather(parts, logits, group=group)
        return torch.cat(parts, -1).argmax(-1)
    most, number = logits.max(-1)
    largest = most.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    number = number + offset * dist.get_rank(group) * share
    if how == "own":
        return number
    if how == "sum":
        return summed(number, group)
    number[most < largest] = size * share if how == "min" else -1
    dist.all_reduce(number, getattr(dist.ReduceOp, how.upper()), group=group)
    return number


def degree(config, limit, node, forget=(), fits=True):
    names = {"heads", "key_value_heads", "ffn_width", "vocab"} - set(forget)
    for t in range(1, node + 1):
        if any(getattr(config, name) % t for name in names):
            continue
        if not fits or memory.estimate(config, Layout(tp=t), device="gpu").peak <= limit:
            return t
    return None


H, WIDE = 4096, 16384
BYTES = 16 * (2 * H * WIDE // 4 + WIDE // 4 + H)
ANSWERS = [
    ("tp_bytes", BYTES, None),
    ("tp_bytes", ..., "There is no answer yet"),
    ("tp_bytes", 16 * (2 * H * WIDE + WIDE + H), "one process holds"),
    ("tp_bytes", 16 * (2 * H * WIDE + WIDE + H) / 4, "one of the biases is not divided"),
    ("tp_bytes", 16 * 2 * H * WIDE // 4, "where are the biases?"),
    ("tp_bytes", BYTES // 4, "Those are the weights"),
    ("tp_bytes", BYTES / 1e9, "in bytes"),
    ("tp_other_order", 8.5, None),
    ("tp_other_order", 4.5, "SwiGLU has two"),
    ("tp_other_order", 8, "have of Y in the end"),
    ("tp_other_order", 9, "gathered, not added up"),
    ("tp_other_order", 17, "what does the right one send?"),
    ("my_ffn_shards", shards, None),
    ("my_ffn_shards", dealt, None),
    ("my_ffn_shards", lambda *_: None, "the shapes None"),
    ("my_ffn_shards", lambda *a: shards(*a, dim=1), "Weights of nn.Linear are [out, in]"),
    ("my_ffn_shards", lambda a, b, c, rank, size: shards(a, b, c, 0, size), "the same piece"),
    ("my_ffn_shards", lambda *a: shards(*a, mine=0), "Columns and rows do not match"),
    ("my_ffn_shards", lambda up, rank: up, "raised TypeError"),
    ("my_gated_ffn", gated, None),
    ("my_gated_ffn", lambda *_: None, "returned None"),
    ("my_gated_ffn", lambda *a: gated(*a, before=True), "was added 2 times"),
    ("my_gated_ffn", lambda *a: gated(*a, none=True), "bias was not added"),
    ("my_gated_ffn", lambda *a: gated(*a, leave=None), "nobody added them up"),
    ("my_gated_ffn", lambda *a: gated(*a, mean=True), "were averaged"),
    ("my_gated_ffn", lambda *a: gated(*a).detach().requires_grad_(), "gets a gradient"),
    ("my_gated_ffn", lambda *a: gated(*a, enter=None), "nothing that adds up in backward"),
    ("my_gated_ffn", lambda *a: gated(*a, leave=Sum.apply), "once more than it should be"),
    (
        "my_gated_ffn",
        lambda x, *a: gated(x, *a, leave=Sum.apply, enter=mean_of),
        "2 times too large",
    ),
    ("my_gated_ffn", lambda *a: gated(*a, twice=True), "let x enter once"),
    ("my_kv_heads", kv_heads, None),
    ("my_kv_heads", lambda *_: None, "two lists are asked for"),
    ("my_kv_heads", lambda *_: (1, 2), "two lists are asked for"),
    ("my_kv_heads", lambda heads, rank: heads, "raised TypeError"),
    ("my_kv_heads", lambda *a: kv_heads(*a, cut=True), "some have to hold the same one"),
    (
        "my_kv_heads",
        lambda h, k, r, n: (
            [r] if n > k else [*range(r * k // n, (r + 1) * k // n)],
            kv_heads(h, k, r, n)[1],
        ),
        "Neighbours",
    ),
    ("my_kv_heads", lambda *a: kv_heads(*a, everyone=True), "Others hold other heads"),
    ("my_kv_heads", lambda *a: kv_heads(*a, alone=True), "queries of its own rank alone"),
    ("my_greedy", greedy, None),
    ("my_greedy", lambda *_: None, "returned None"),
    ("my_greedy", lambda *a: greedy(*a, how="own"), "own likeliest entry"),
    ("my_greedy", lambda *a: greedy(*a, offset=False), "begin at r v"),
    ("my_greedy", lambda *a: greedy(*a, how="sum"), "were added up"),
    ("my_greedy", lambda *a: greedy(*a, how="max"), "one process takes the smallest"),
    ("my_greedy", lambda *a: greedy(*a, gather=True), "do without sending logits"),
    ("my_degree", degree, None),
    ("my_degree", lambda *_: None, "One divides and fits"),
    ("my_degree", lambda *a: degree(*a) or 0, "None fits, thus None"),
    ("my_degree", lambda *_: 1, "That does not fit"),
    ("my_degree", lambda *_: 8, "A smaller one fits as well"),
    ("my_degree", lambda *_: 16, "share no fast link"),
    ("my_degree", lambda config, limit, node: 4 if config.hidden > 2000 else 3, "key-value heads"),
    ("my_degree", lambda *a: degree(*a, forget=["vocab"]), "It does not divide vocab"),
    ("my_degree", lambda *a: degree(*a, forget=["key_value_heads"]), "raised ValueError: tp=3"),
]


@each(ANSWERS)
def test_exercises_accept_the_solution_and_help_with_mistakes(name, answer, words):
    judged(name, answer, words)
