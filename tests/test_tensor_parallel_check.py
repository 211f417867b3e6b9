"""Lesson `tensor_parallel`: its exercises accept solutions, and help with common mistakes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import each, judged
from torch.nn import functional as F

from shardlab import memory


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


def ffn(x, up, up_bias, down, down_bias, group, before=False, after=True, reduce=True, **changes):
    wide = x @ up.T + up_bias
    y = (wide if changes.get("straight") else F.gelu(wide)) @ down.T
    y = y + down_bias if before else y
    if reduce:
        dist.all_reduce(y, group=group)
    y = y / dist.get_world_size(group) if changes.get("mean") else y
    return y + down_bias if after else y


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, how):
        ctx.group, ctx.how = group, how
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.how != "own":
            dist.all_reduce(gradient, group=ctx.group)
        return gradient / (dist.get_world_size() if ctx.how == "mean" else 1), None, None


def copy_to(x, group, how="sum"):
    return Copy.apply(x, group, how)


def copy_by_hook(x, group):
    copy = x.view_as(x)
    copy.register_hook(lambda gradient: summed(gradient.clone(), group))
    return copy


def hook_on_x(x, group):
    x.register_hook(lambda gradient: summed(gradient.clone(), group))
    return x


def summed(tensor, group):
    dist.all_reduce(tensor, group=group)
    return tensor


def loss(logits, targets, group, most="all", everyone=False, how="mean", gather=False):
    share = logits.shape[-1]
    if gather:
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, logits, group=group)
        return F.cross_entropy(torch.cat(parts, -1).flatten(0, 1), targets.flatten())
    most_BS = logits.new_zeros(targets.shape) if most == "none" else logits.amax(-1)
    if most == "all":
        dist.all_reduce(most_BS, dist.ReduceOp.MAX, group=group)
    shifted = logits - most_BS[..., None]
    local = targets - dist.get_rank(group) * share
    own = ((local >= 0) & (local < share)) | everyone
    picked = shifted.gather(-1, local.clamp(0, share - 1)[..., None])[..., 0]
    sums = torch.stack([shifted.exp().sum(-1), picked * own])
    dist.all_reduce(sums, group=group)
    lost = sums[0].log() - sums[1]
    return lost if how == "none" else getattr(lost, how)()


def degree(config, limit, node, forget=(), fits=True):
    names = {"heads", "key_value_heads", "ffn_width", "vocab"} - set(forget)
    for t in range(1, node + 1):
        if any(getattr(config, name) % t for name in names):
            continue
        if not fits or memory.estimate(config, tp=t, device="gpu").peak <= limit:
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
    ("my_ffn", ffn, None),
    ("my_ffn", lambda *_: None, "returned None"),
    ("my_ffn", lambda *a: ffn(*a, before=True, after=False), "was added 2 times"),
    ("my_ffn", lambda *a: ffn(*a, after=False), "last bias was not added"),
    ("my_ffn", lambda *a: ffn(*a, reduce=False), "nobody added them up"),
    ("my_ffn", lambda *a: ffn(*a, mean=True), "were averaged"),
    ("my_ffn", lambda *a: ffn(*a, straight=True), "no GELU"),
    ("my_copy_to", copy_to, None),
    ("my_copy_to", copy_by_hook, None),
    ("my_copy_to", lambda x, group: None, "returned None"),
    ("my_copy_to", lambda x, group: x, "nothing was added up in backward"),
    ("my_copy_to", lambda *a: copy_to(*a, "own"), "nothing was added up in backward"),
    ("my_copy_to", lambda *a: copy_to(*a, "mean"), "It is the average over ranks"),
    ("my_copy_to", lambda x, group: summed(x.detach().clone(), group), "Forward it should leave x"),
    ("my_copy_to", lambda x, group: x.detach(), "x gets no gradient through it"),
    ("my_copy_to", hook_on_x, "belongs to the copy, not to x"),
    ("my_loss", loss, None),
    ("my_loss", lambda *_: None, "returned None"),
    ("my_loss", lambda *a: loss(*a, most="none"), "subtract the largest logit of all ranks"),
    ("my_loss", lambda *a: loss(*a, most="own"), "its own largest logit"),
    ("my_loss", lambda *a: loss(*a, everyone=True), "one alone has it"),
    ("my_loss", lambda *a: loss(*a, how="sum"), "the mean is asked for"),
    ("my_loss", lambda *a: loss(*a, how="none"), "has the shape (2, 3)"),
    ("my_loss", lambda *a: loss(*a, gather=True), "do without sending logits"),
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
