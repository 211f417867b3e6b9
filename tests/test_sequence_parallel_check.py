"""Lesson `sequence_parallel`: its exercises accept solutions, and help with common mistakes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import each, judged

from shardlab import ranks
from shardlab.check import check

SBH = 2048 * 12_288


def zigzag(seq, rank, size):
    piece, late = seq // (2 * size), 2 * size - 1 - rank
    first = range(rank * piece, (rank + 1) * piece)
    return [*first, *range(late * piece, (late + 1) * piece)]


def zigzag_late_first(seq, rank, size):
    positions = zigzag(seq, rank, size)
    return positions[len(positions) // 2 :] + positions[: len(positions) // 2]


def contiguous(seq, rank, size):
    return range(rank * seq // size, (rank + 1) * seq // size)


def merge(o1, l1, o2, l2):
    log_sum = torch.logaddexp(l1, l2)
    return o1 * (l1 - log_sum).exp()[..., None] + o2 * (l2 - log_sum).exp()[..., None], log_sum


def merge_overflows(o1, l1, o2, l2):
    w1, w2 = l1.exp()[..., None], l2.exp()[..., None]
    return (o1 * w1 + o2 * w2) / (w1 + w2), (l1.exp() + l2.exp()).log()


def merge_nan(o1, l1, o2, l2):
    gap = l2 - l1  # infinite where a block is empty, and 0 times infinity is nothing at all
    share = 1 / (1 + gap.exp())
    log_sum = torch.maximum(l1, l2) + torch.log1p((-gap.abs()).exp())
    return o1 * share[..., None] + o2 * (1 - share)[..., None] + 0 * gap[..., None], log_sum


class Enter(torch.autograd.Function):
    """All-gather along the sequence; backward a reduce-scatter, or a mistake in its place."""

    @staticmethod
    def forward(ctx, x_BsH, group, mistake):
        ctx.group, ctx.mistake = group, mistake
        parts = [torch.empty_like(x_BsH) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x_BsH.contiguous(), group=group)
        return torch.cat(parts, 0 if mistake == "batch" else 1)

    @staticmethod
    def backward(ctx, gradient_BSH):
        gradient_BSH = gradient_BSH.contiguous()
        if ctx.mistake != "own":
            dist.all_reduce(gradient_BSH, group=ctx.group)
        size = dist.get_world_size(ctx.group)
        return gradient_BSH.chunk(size, 1)[dist.get_rank(ctx.group)], None, None


def enter(mistake=None):
    return lambda x_BsH, group: Enter.apply(x_BsH, group, mistake)


def enter_without_gradient(x_BsH, group):
    return Enter.apply(x_BsH.detach(), group, None)


def enter_mixed(x_BsH, group):
    gathered = Enter.apply(x_BsH, group, "batch")
    return gathered.reshape(x_BsH.shape[0], -1, x_BsH.shape[-1])


def attend(q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def ring(turns_too_many=0, weigh=True):
    def my_ring(q, k, v, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        block = torch.stack((k, v))
        out, log_sum = attend(q, *block)
        parts = [out]
        for turn in range(1, size + turns_too_many):
            arriving = torch.empty_like(block)
            ranks.exchange(block, (rank + 1) % size, arriving, (rank - 1) % size, group).wait()
            block = arriving
            if turn < size:
                parts.append(attend(q, *block)[0])
                out, log_sum = merge(out, log_sum, *attend(q, *block))
        return out if weigh else torch.stack(parts).mean(0)

    return my_ring


def own_block(q, k, v, group):
    return attend(q, k, v)[0]


def gathers(q, k, v, group):
    parts = [torch.empty_like(torch.stack((k, v))) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, torch.stack((k, v)), group=group)
    return attend(q, *torch.cat(parts, 3))[0]


def context(seq, kept, states, memory, heads, kv_heads, shared=False, narrow=True, whole=True):
    for n in (1, 2, 4, 8, 16, 32, 64):
        if states / (n if shared else 1) + kept * seq / n <= memory:
            k = kv_heads if narrow else heads
            if n == 1:
                return 1, "none"
            divides = not whole or heads % n == kv_heads % n == 0
            return n, "all-to-all" if divides and heads + k < n * k else "ring"
    return None


def always(way):
    return lambda *job: found and (found[0], way) if (found := context(*job)) else None


# Name of the exercise, an answer, words of the verdict; None: it is right.
ANSWERS = [
    ("sequence_bytes", SBH * 34 / 8, None),
    ("sequence_bytes", SBH * 13, "tensor parallelism alone"),
    ("sequence_bytes", SBH * 34, "whole layer"),
    ("sequence_bytes", SBH * (34 + 80) / 8, "keeps attention's scores"),
    ("sequence_bytes", SBH * 3, "where are the norms'"),
    ("sequence_bytes", SBH * 34 / 8e6, "In MB it is right"),
    ("sequence_bytes", ..., "no answer yet"),
    ("my_zigzag", zigzag, None),
    ("my_zigzag", lambda *a: torch.tensor(zigzag(*a)), None),
    ("my_zigzag", contiguous, "the contiguous cut"),
    ("my_zigzag", lambda s, r, n: range(r, s, n), "the striped cut"),
    ("my_zigzag", zigzag_late_first, "their order is not"),
    ("my_zigzag", lambda s, r, n: zigzag(s, r, n)[: s // n // 2], "second piece is missing"),
    ("my_zigzag", lambda s, r, n: range(s), "Each rank has 4 of the 8"),
    (
        "my_zigzag",
        lambda s, r, n: zigzag(s, n - 1 - r, n),
        "Of 4 pieces rank 0 has numbers 0 and 3",
    ),
    ("my_zigzag", lambda s, r, n: None, "returned None; it should be a list"),
    ("my_zigzag", lambda s: None, "raised TypeError"),
    ("my_merge", merge, None),
    ("my_merge", merge_overflows, "exponentials of differences only"),
    ("my_merge", merge_nan, "come out unchanged"),
    ("my_merge", lambda *p: ((p[0] + p[2]) / 2, merge(*p)[1]), "mean of both"),
    ("my_merge", lambda *p: (p[0] + p[2], merge(*p)[1]), "sum of both: their weights"),
    ("my_merge", lambda *p: (merge(*p)[0], p[1] + p[3]), "sums, not their logarithms"),
    ("my_merge", lambda *p: (merge(*p)[0], torch.maximum(p[1], p[3])), "larger of both"),
    ("my_merge", lambda *p: merge(*p)[0], "a pair of tensors"),
    ("my_merge", lambda *p: None, "a pair of tensors"),
    ("my_enter", enter(), None),
    ("my_enter", enter("own"), "this rank's gradient alone"),
    ("my_enter", enter("batch"), "has the shape"),
    ("my_enter", enter_mixed, "whole batches"),
    ("my_enter", enter_without_gradient, "know nothing of autograd"),
    ("my_enter", lambda x, group: None, "Rank 0 returned None"),
    ("my_ring", ring(), None),
    ("my_ring", ring(turns_too_many=1), None),
    ("my_ring", ring(weigh=False), "the mean of the blocks' outputs"),
    ("my_ring", own_block, "own keys alone"),
    ("my_ring", gathers, "it calls all_gather"),
    ("my_ring", lambda *a: None, "Rank 0 returned None"),
    ("my_context", context, None),
    ("my_context", lambda *a: list(context(*a) or ()) or None, "It should be a pair"),
    ("my_context", lambda *a: context(*a, shared=True), "divides no states"),
    ("my_context", lambda *a: context(*a, whole=False), "divide both numbers of heads"),
    ("my_context", lambda *a: context(*a, narrow=False), "fewer heads than queries"),
    ("my_context", lambda *a: context(*a) or (64, "ring"), "do 64 ranks suffice"),
    ("my_context", always("ring"), "has nobody to talk to"),
    ("my_context", lambda *a: context(*a) and (context(*a)[0], "none"), "The ranks are right"),
    ("my_context", lambda seq: None, "raised TypeError"),
]


@each(ANSWERS)
def test_exercises_accept_the_solution_and_help_with_mistakes(name, answer, words):
    judged(name, answer, words)


def test_the_ring_says_when_a_block_is_sent_for_nothing():
    assert "3 are enough" in check(ring(turns_too_many=1), "my_ring").message
    assert "3 are enough" not in check(ring(), "my_ring").message
