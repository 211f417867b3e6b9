"""Lesson `sequence_parallel`: its exercises accept solutions, and help with common mistakes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import each, judged

SBH = 2048 * 12_288


def summands(names):
    return {n for n in names if "norm." in n or n.endswith(("out.bias", "down.bias"))}


def gather(x, group, dim=1):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


class Column(torch.autograd.Function):
    """The right one, or with a mistake."""

    @staticmethod
    def forward(ctx, x, w, group, mistake):
        ctx.group, ctx.mistake = group, mistake
        whole = gather(x, group)
        if mistake == "mixed":
            whole = gather(x, group, 0).view(whole.shape)
        ctx.save_for_backward(whole if mistake == "kept" else x, w)
        if mistake == "attribute":
            ctx.whole = whole
        return whole @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        dx = dy @ w.T
        if ctx.mistake != "own":
            dist.all_reduce(dx, group=ctx.group)
        if ctx.mistake == "kept":
            whole = x
        else:
            whole = ctx.whole if ctx.mistake == "attribute" else gather(x, ctx.group)
        if ctx.mistake == "tokens":
            dw = x.flatten(0, 1).T @ dy.chunk(size, 1)[rank].flatten(0, 1)
        else:
            dw = whole.flatten(0, 1).T @ dy.flatten(0, 1)
        return dx.chunk(size, 1)[rank], dw, None, None


def column(mistake=None):
    return lambda x, w, group: Column.apply(x, w, group, mistake)


# Name of the exercise, an answer, words of the verdict; None: it is right.
ANSWERS = [
    ("sequence_bytes", SBH * 34 / 8, None),
    ("sequence_bytes", SBH * 13, "tensor parallelism alone"),
    ("sequence_bytes", SBH * 34, "whole layer"),
    ("sequence_bytes", SBH * (34 + 80) / 8, "keeps attention's scores"),
    ("sequence_bytes", SBH * 3, "where are the norms'"),
    ("sequence_bytes", SBH * 34 / 8e6, "In MB it is right"),
    ("sequence_bytes", ..., "no answer yet"),
    ("my_summands", summands, None),
    ("my_summands", lambda names: list(summands(names)), None),
    ("my_summands", lambda names: [n for n in names if "norm." in n], "behind the reduce-scatter"),
    ("my_summands", lambda names: [n for n in summands(names) if "norm" not in n], "A norm is"),
    ("my_summands", lambda names: [n for n in summands(names) if n != "norm.bias"], "'norm.bias'"),
    ("my_summands", lambda names: {*summands(names), *(n for n in names if "bias" in n)}, "is cut"),
    ("my_summands", lambda names: summands(names) | {"embedding.weight"}, "cut by the vocabulary"),
    ("my_summands", lambda names: names, "one too many"),
    ("my_summands", lambda names: {"bias"}, "none of the names"),
    ("my_summands", lambda names: None, "as a list or a set"),
    ("my_column", column(), None),
    ("my_column", column("own"), "this rank's part alone"),
    ("my_column", column("tokens"), "this rank's tokens alone"),
    ("my_column", column("mixed"), "whole batches"),
    ("my_column", column("kept"), "kept until backward"),
    ("my_column", column("attribute"), "kept until backward"),
    ("my_column", lambda x, w, group: gather(x.detach(), group) @ w, "know nothing of autograd"),
    ("my_column", lambda x, w, group: x @ w, "has the shape"),
    ("my_column", lambda x, w, group: None, "Rank 0 returned None"),
]


@each(ANSWERS)
def test_exercises_accept_the_solution_and_help_with_mistakes(name, answer, words):
    judged(name, answer, words)
