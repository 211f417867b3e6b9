"""Wrong answers that readers give, and a few right ones that are not the lesson's, by exercise.

    exercise: [(answer, words of the verdict), …]

Words of None: it is right. `Swap("old", "new")` is the lesson's own solution with a piece of its
text replaced: what is right stands in the lesson, and the mistake stands here. The solutions
themselves, and the forms without an answer, are read from the lessons.
"""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from shardlab import collectives, memory, ranks
from shardlab.gpt.model import loss
from shardlab.layout import Layout
from shardlab.tensor_parallel import copy_to
from shardtools import parity


class Swap:
    """A solution in which each `old` is replaced by its `new`."""

    def __init__(self, *texts: str):
        self.pairs = list(zip(texts[::2], texts[1::2], strict=True))


def nothing(*_: Any) -> None:
    """A function that does and returns nothing."""


# ------------------------------------------------------------------------------- zero

ZERO = {
    "zero_bytes": [
        (13e9 * 16, "stage 0"), (13e9 * (4 + 12 / 32), "stage 1"), (13e9 * 16 / 32, "stage 3"),
        (13e9 * (2 + 12 / 32), "this rank's gradients"),
        (31.6875, "a factor of 10^9: the unit is bytes"), ("31 GB", "should be a number of bytes"),
    ],
    "my_shard_bounds": [
        (nothing, "a pair"),
        (lambda *_: 0, "a pair"),
        (Swap("-(-elements // size)", "elements // size"), "belong to nobody"),
        (lambda n, r, size: (r * -(-n // size), (r + 1) * -(-n // size)), "is padding"),
        (Swap("min(rank * shard, elements)", "rank * shard"), "behind the end"),
        (lambda n, r, size: (r * (n // size), n if r == size - 1 else (r + 1) * (n // size)),
         "All shards have the same size"),
        (lambda elements, rank: (0, 1), "raised TypeError"),
    ],
    "my_mixed_step": [
        (nothing, "Nothing has changed"),
        (Swap("master -= lr", "master = master - lr"), "`master = …` gives the name"),
        (Swap(" / dist.get_world_size(group))", ")"), "summed over 2 ranks, not averaged"),
        (Swap("zero.all_gather(weights, own, group).wait()", "..."), "nobody has the others'"),
        (Swap("weights[own] = master", "..."), "never get into the weights"),
        (Swap("moment.mul_(decay).add_", "moment = (decay * moment).add_"), "does not carry over"),
        (Swap("gradient.float()", "gradient"), "added up in bfloat16"),
        (Swap("master -= lr * moment", "...", "weights[own] = master",
              "weights[own] -= (lr * moment).bfloat16()"), "small steps round away"),
        (Swap("zero.ReduceScatter(gradient.float(), group, ordered=True).wait()",
              "gradient[own].float()", " / dist.get_world_size(group))", ")"),
         "not averaged at all"),
    ],
    "my_global_norm": [
        (Swap("return square.sqrt()", "return square.sqrt().item()"), None),
        (lambda gradients, group: ..., "should be a tensor"),
        (Swap("dist.all_reduce(square, group=group)", "..."), "own pieces"),
        (Swap("dist.all_reduce", "square.sqrt_()\n    dist.all_reduce", "square.sqrt()", "square"),
         "sum of the ranks' norms"),
        (Swap("square.sqrt()", "square"), "square of the norm"),
        (Swap("(square, group", "(square, dist.ReduceOp.AVG, group"), "mean over ranks"),
    ],
    "my_stage": [
        (nothing, "returned None"),
        (Swap("held + activations", "held"), "leaves out the activations"),
        (Swap("held + activations", "held + activations / ranks_"), "No stage divides activations"),
        (lambda *_: 3, "A smaller stage fits"),
        (Swap("return None", "return 3"), "Does stage 3 fit?"),
        (lambda params: 3, "raised TypeError"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- data_parallel

DATA_PARALLEL = {
    "ddp_bytes": [
        (217e6, "four bytes"), (434e6, "have to come back"), (2 * 496e6, "an eighth stays"),
        (496e6, "the two halves"), (7 * 496e6, "a ring does better"),
    ],
    "overlap_floor": [
        (0.19, "without any overlap"), (0.10, "before forward"), (0.09, "compute alone"),
    ],
    "my_exact_average": [
        (nothing, "nothing was averaged"),
        (Swap("        if used:", "        if True:"), "no rank used has a gradient of zeros"),
        (Swap("dist.ReduceOp.AVG", "dist.ReduceOp.SUM"), "the sum over the ranks, 2 times"),
        (Swap("    for", "    trained[0].data += 1\n    for"),
         "parameters themselves have changed"),
        (Swap("if used:", "if parameter.grad is not None:"), "in that parameter's all-reduce"),
    ],
    "my_joined_loss": [
        (nothing, "should be a tensor"),
        (lambda s, n, g: s / n, "average of the ranks' own means"),
        (Swap("loss_sum * dist.get_world_size(group)", "loss_sum"), "3 times too small"),
        (lambda s, n, g: s, "nothing was divided"),
        (lambda s, n, g: torch.tensor(s.item()), "does not depend on loss_sum"),
    ],
    "my_accumulate": [
        (nothing, "No backward ran"),
        (Swap("with model.no_sync():", "if True:"), "messages for"),
        (Swap("    (loss_of(last)", "    with model.no_sync():\n        (loss_of(last)"),
         "outside no_sync()"),
        (Swap(" / len(micro_batches)", ""), "3 times too large"),
    ],
    "my_micro_batches": [
        (nothing, "returned None"),
        (lambda *job: 22.8, "returned 22.8; it should be a whole number"),
        (lambda size, n: 1, "raised TypeError"),
        (lambda *job: 40, "With 2 GB on 8 ranks: it returned 40. That is too many."),
        (lambda *job: 1, "too few"),
        (Swap(" - backward)", ")"), "let nothing overlap"),
        (Swap(" - backward)", ")", "waiting >", "max(0, waiting - m * backward) >"), "hides any"),
        (Swap("2 * (n - 1) / n * ", ""), "and not the gradients once"),
        (Swap("(forward + backward)", "backward"), "computes forward passes as well"),
        (Swap("(waiting + m", "(m"), "waiting included"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- collectives


def max_on_rank_0_only(tensor, group):
    if dist.get_rank(group) > 0:
        ranks.isend(tensor, 0, group).wait()
        return
    other = torch.empty_like(tensor)
    for peer in range(1, dist.get_world_size(group)):
        ranks.irecv(other, peer, group).wait()
        tensor.copy_(torch.maximum(tensor, other))


def swapped(way, into_itself=False):
    def shift(tensor, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        received = torch.empty_like(tensor)
        after, before = (rank + way) % size, (rank - way) % size
        ranks.exchange(tensor, after, received, before, group).wait()
        return tensor.copy_(received) if into_itself else received

    return shift


def all_send_first(tensor, group):
    """With gloo it works."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    sent = ranks.isend(tensor, (rank + 1) % size, group)
    ranks.irecv(received, (rank - 1) % size, group).wait()
    sent.wait()
    return received


def all_pieces_to_all(tensor, root, group):
    for piece in collectives.split(tensor, dist.get_world_size(group)):
        if dist.get_rank(group) == root:
            for peer in range(dist.get_world_size(group)):
                if peer != root:
                    ranks.isend(piece, peer, group).wait()
        else:
            ranks.irecv(piece, root, group).wait()


FORMULA = "size * latency * bandwidth * (1 - fraction) / fraction"
COLLECTIVES = {
    "ring_bytes": [
        (60, "average over the ranks"), (28, "reduce-scatter alone"), (14, "number of elements"),
        (120, "naive way"), (57, "too large"), ("56", "should be a number"),
    ],
    "all_reduce_max": [
        (lambda t, g: collectives.all_reduce(t, g), "That is the sum"),
        (max_on_rank_0_only, "one half of an all-reduce is missing"),
        (Swap("torch.stack(everyones)", "torch.stack([0 * tensor, *everyones])"), "began as zeros"),
        (Swap("tensor.copy_(", "return ("), "belongs into `tensor` itself"),
        (lambda t, g: dist.all_reduce(t, dist.ReduceOp.MAX, g), "calls all_reduce of torch"),
        (lambda t, g: t.sum(7), "raised IndexError"),
    ],
    "shift": [
        (swapped(1), None),
        (Swap("if rank % 2 == 0", "if False"), "what nobody sends"),
        (all_send_first, "With nccl it hangs, on 2 ranks"),
        (swapped(-1), "the ring turns the wrong way"),
        (swapped(1, into_itself=True), "Use a second tensor"),
        (lambda t, g: t, "It is the rank's own tensor"),
        (nothing, "Rank 0 returned None"),
    ],
    "broadcast_large": [
        (Swap("collectives.all_gather(pieces, pieces[rank], group)", "..."), "is off by"),
        (lambda t, root, g: collectives.broadcast(t, 0, g), "`root` was not looked at"),
        (collectives.broadcast, "Send pieces"),
        (all_pieces_to_all, "need not send every piece to everyone"),
    ],
    "my_bucket_bytes": [
        (Swap(FORMULA, FORMULA[7:]), "it has to be N times as large"),
        (Swap("(1 - fraction) / fraction", "1 / fraction"), "The share is of all the time"),
        (lambda n, a, b, s: a * b / s, "and the share is of all the time"),
        (Swap("return size", "return 2 * size"), "both have bytes"),
        (Swap("return size", "return 2 * (size - 1)"), "Count 2 (N - 1)/N"),
        (Swap("/ fraction", "/ fraction / 4"), "bytes are asked"),
        (lambda n, a, b, s: collectives.CostModel(a, b).crossover(n), "begins to beat the tree"),
        (lambda n, a, b, s: "25 MB", "should be a number"),
        (lambda n, a: 0, "raised TypeError"),
        (lambda n, a, b, s: 25e6 + n, "It is too large"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- gemm

C = 4 * 4096 * 11008
REDUCE = "dist.all_reduce(c_MN, group=group)"
GEMM = {
    "gemm_bytes": [
        (0.75 * C, "a reduce-scatter"), (3 * C, "naive way"), (C, "the size of C"),
        (2 * C, "very many ranks"), (1.5 * 4096 * 11008, "elements"),
        (1.5 * 4 * 4096 * 2048, "wrong matrix"),
        (1.5 * C / 1e6, "a factor of 10^6: the unit is bytes"),
    ],
    "gemm_pays": [
        (4000, "a multiply-add as one"), (1750, "Both sides lose an eighth"),
        (1000, "into the numerator"), (250, "at the same time"),
    ],
    "my_backward_of_columns": [
        (Swap("dist.all_reduce(grad_MK, group=group)", "..."), "has its own part"),
        (Swap("return grad_MK,", "return grad_MK / group.size(),"), "the mean of the ranks' parts"),
        (Swap("    return grad_MK, a_MK.T @ grad_Mn",
              "    b = a_MK.T @ grad_Mn\n    dist.all_reduce(b)\n    return grad_MK, b"),
         "These are sums over the ranks"),
        (Swap("    return", "    dist.barrier(group)\n    return"), "collectives where 1 will do"),
        (lambda a, b, grad, group: a, "it should return A's gradient"),
        (lambda a_MK: a_MK, "TypeError"),
    ],
    "my_inner": [
        (Swap(REDUCE, "c_MN += bias_N\n    " + REDUCE, " + bias_N", ""),
         "The bias is in it 2 times"),
        (Swap("c_MN + bias_N", "c_MN"), "The bias is missing"),
        (Swap(REDUCE, "..."), "and the bias: nobody has added them up"),
        (lambda a, b, bias, group: a @ b, "own products: nobody has added them up"),
        (Swap("return c_MN", "return c_MN / group.size()"), "the mean of the ranks' products"),
        (nothing, "returned None"),
    ],
    "my_two_products": [
        (Swap("dist.all_reduce(z_MN, group=group)", "..."), "cut in its inner dimension"),
        (Swap("F.gelu(x_MK @ v_Kf)", "x_MK @ v_Kf"), "GELU is missing"),
        (Swap("F.gelu(x_MK @ v_Kf)", "x_MK @ v_Kf", "return z_MN", "return F.gelu(z_MN)"),
         "between the two products"),
        (Swap("return z_MN", "return z_MN / group.size()"), "mean of the ranks' parts"),
        (Swap("    return", "    dist.barrier(group)\n    return"), "collectives where 1 will do"),
    ],
    "my_ring_product": [
        (Swap("range(size)", "range(1)"), "own piece of B"),
        (Swap("(rank - step)", "(rank + step)"), "those of rank (r + i)"),
        (Swap("    return", "    dist.barrier(group)\n    return"), "ranks.exchange"),
        (Swap("    return", "    ranks.exchange(b_kN, after, piece, before, group)\n    return"),
         "are enough"),
        (Swap("travelling = ranks.exchange(piece, after, following, before, group)",
              "sent = ranks.isend(piece, after, group)\n"
              "            ranks.irecv(following, before, group).wait(), sent.wait()",
              "travelling.wait()", "..."), "With nccl it hangs"),
        (lambda a, b, group: ranks.irecv(b, 1 - group.rank(), group).wait(), "what nobody sends"),
    ],
    "my_way": [
        (Swap("M * k + k * N + M * N", "M * k + k * N + m * N"), "as large as all of C"),
        (lambda *_: "rows", "The fullest rank has"),
        (lambda *_: 1, "one of 'rows', 'columns' and 'inner'"),
        (lambda M, K: "rows", "raised TypeError"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- context_parallel


def zigzag(seq, rank, size):
    piece, late = seq // (2 * size), 2 * size - 1 - rank
    first = range(rank * piece, (rank + 1) * piece)
    return [*first, *range(late * piece, (late + 1) * piece)]


def passing(first, tensor, group):
    """Whether a rank sends first: by its number."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    coming = torch.empty_like(tensor)
    steps = [
        lambda: dist.send(tensor, (rank + 1) % size, group=group),
        lambda: dist.recv(coming, (rank - 1) % size, group=group),
    ]
    for step in steps if first(rank) else steps[::-1]:
        step()
    return coming


def by_parity(tensor, group):
    return passing(lambda rank: rank % 2 == 0, tensor, group)


def all_send(tensor, group):
    return passing(lambda rank: True, tensor, group)


def all_begin_to_send(tensor, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    coming = torch.empty_like(tensor)
    works = (
        dist.isend(tensor, (rank + 1) % size, group=group),
        dist.irecv(coming, (rank - 1) % size, group=group),
    )
    for work in works:
        work.wait()
    return coming


def gathered(tensor, group, dim=0):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def attend(q, k, v, hidden=None):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def triangle(q, size=1):
    return torch.ones(size * q.shape[2], size * q.shape[2]).triu(1).bool()


def gathers(q, k, v, group):
    local_seq, rank, size = q.shape[2], dist.get_rank(group), dist.get_world_size(group)
    hidden = triangle(q, size)[rank * local_seq : (rank + 1) * local_seq]
    return attend(q, gathered(k, group, 2), gathered(v, group, 2), hidden)


PASSING = "passing = ranks.exchange(kv, (rank + 1) % N, coming, (rank - 1) % N, group)"
ONE_BY_ONE = (
    "sent = ranks.isend(kv, (rank + 1) % N, group)\n"
    "            ranks.irecv(coming, (rank - 1) % N, group).wait(), sent.wait()"
)
MEAN = Swap(
    "weight = torch.sigmoid(block_sum - log_sum)",
    "n = turn if turn <= rank else 0; weight = 1 / (n + 1)",
)
CONTEXT_PARALLEL = {
    "my_zigzag": [
        (lambda *a: torch.tensor(zigzag(*a)), None),
        (lambda s, r, n: range(r * s // n, (r + 1) * s // n), "the contiguous cut"),
        (lambda s, r, n: range(r, s, n), "the striped cut"),
        (lambda *a: zigzag(*a)[::-1], "their order is not"),
        (lambda s, r, n: zigzag(s, r, n)[: s // n // 2], "second piece is missing"),
        (lambda s, r, n: range(s), "Each rank has 4 of the 8"),
        (lambda s, r, n: zigzag(s, n - 1 - r, n), "Of 4 pieces rank 0 has numbers 0 and 3"),
        (nothing, "returned None, which should be a list"),
        (lambda s: None, "raised TypeError"),
    ],
    "my_pass": [
        (by_parity, None), (all_send, "one has to send first"),
        (all_begin_to_send, "Let even ranks send first"),
        (Swap("+ 1) % N", "+ 1 - N) % N", "- 1) % N", "- 1 + N) % N"), None),
        (Swap("(rank + 1)", "(rank+1)", "(rank - 1)", "(rank + 1)", "(rank+1)", "(rank - 1)"),
         "the other way"),
        (lambda t, group: t, "its own tensor"),
        (lambda t, group: gathered(t[None], group)[dist.get_rank(group) - 1], "calls all_gather"),
        (nothing, "Rank 0 returned None"),
    ],
    "my_decode": [
        (Swap("dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)", "largest *= 0"),
         "finite"),
        (Swap("(log_sum - largest).exp()", "torch.ones_like(log_sum)"),
         "mean of the ranks' outputs"),
        (Swap("(log_sum - largest).exp()", "torch.ones_like(log_sum)", " / both[..., -1:]", ""),
         "sum of the ranks' outputs"),
        (lambda q, k, v, group: attend(q, gathered(k, group, 2), gathered(v, group, 2)),
         "as many bytes as its keys"),
        (lambda q, k, v, group: attend(q, k, v), "own keys alone"),
        (nothing, "Rank 0 returned None"),
    ],
    "my_ring": [
        (Swap("if turn < N - 1:\n            passing =", "if True:\n            passing ="), None),
        (Swap(PASSING, ONE_BY_ONE, "passing.wait()", "..."), "Let even ranks send first"),
        (Swap("if source <= rank", "if True", "if source == rank", "if False"), "without a mask"),
        (Swap("if source == rank", "if False"), "seen those behind it"),
        (Swap("if source <= rank", "if True", "if source == rank", "if True"),
         "own block alone: earlier"),
        (Swap("if source <= rank", "if True", "if source == rank:",
              "if source >= rank:\n                hidden = hidden | (source > rank)"), "is nan"),
        (MEAN, "the mean of the blocks' outputs"),
        (lambda q, k, v, group: attend(q, k, v, triangle(q)), "own keys alone"),
        (gathers, "calls all_gather"), (nothing, "Rank 0 returned None"),
    ],
    "my_context": [
        (Swap("return 1,", "return [1]; 1,"), "should be a pair"),
        (Swap("states + kept", "states / N + kept"), "divides no states"),
        (Swap("if divides and", "if"), "divide both numbers of heads"),
        (Swap("(heads + kv_heads) / N < kv_heads", "2 * heads < N * heads"),
         "fewer heads than queries"),
        (Swap("return None", 'return 64, "ring"'), "do 64 ranks suffice"),
        (Swap('"none"', '"ring"'), "has nobody to talk to"),
        (Swap('"all-to-all"', '"none"'), "The ranks are right"),
        (lambda seq: None, "raised TypeError"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- experts

WIRE = 2 * 4096 * 8 * 7168 * 2
EXPERTS = {
    "experts_tokens": [
        (300 * 256, "eight experts"), (2400, "How many experts share them?"),
        (150, "all of them together"), ("many", "should be a number of tokens"),
    ],
    "experts_wire": [
        (WIRE, "does not leave it"), (WIRE * 63 / 128, "has to come back"),
        (WIRE / 2, "own experts' rows included"), (WIRE * 63 / 32, "asked is forward"),
        (WIRE / 8 * 63 / 64, "as eight rows"),
    ],
    "my_admit": [
        (Swap("for c in range(chosen_TC.shape[1]):\n        for t in range(chosen_TC.shape[0]):",
              "for t in range(chosen_TC.shape[0]):\n        for c in range(chosen_TC.shape[1]):"),
         "token by token"),
        (lambda x, n, p: x, "Nothing is dropped"),
        (Swap("== places", "== places + 1"), "it has 3 places"),
        (Swap("== places", "== places - 1"), "should be"),
        (lambda x, n, p: x.tolist(), "should be a tensor"),
        (lambda x, n, p: x[0], "Its shape is (2,); it should be (6, 2)"),
        (lambda x, n: x, "raised TypeError"),
    ],
    "my_exchange": [
        (lambda x, *_: x, "rows"),
        (nothing, "returned None"),
    ],
    "my_average": [
        (Swap("own /= data", "own /= copies"), "four ranks brought tokens"),
        (Swap("(own, group=copies)", "(own, group=data)"), "different experts"),
        (Swap("own /= data.size()", "..."), "That is the sum"),
        (Swap("shared /= data.size()", "..."), "That is the sum"),
        (nothing, "off by"),
    ],
    "my_balancing": [
        (Swap("dist.all_reduce(load_E, group=group)", "..."), "each rank's own tokens"),
        (Swap("scores_TE.mean(0)", "scores_TE.detach().mean(0)"), "no gradient"),
        (lambda scores, chosen, group: 1.0, "a tensor of one number"),
    ],
    "my_expert_ranks": [
        (Swap(" >= rows", " >= 0"), "gets 32 rows"),
        (lambda *_: 8, "Right is 4"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- sequence_parallel

SBH = 2048 * 12_288
AGAIN = "Column.gather(x_BsH, ctx.group)"
SEQUENCE_PARALLEL = {
    "sequence_bytes": [
        (SBH * 13, "tensor parallelism alone"), (SBH * 34, "whole layer"),
        (SBH * (34 + 80) / 8, "keeps attention's scores"), (SBH * 3, "where are the norms'"),
        (SBH * 34 / 8e6, "10^6: the unit is bytes"),
    ],
    "my_summands": [
        (Swap(" or name.endswith(late)", ""), "behind the reduce-scatter"),
        (Swap('"norm." in name or ', ""), "A norm is"),
        (Swap('"norm."', '"n.norm."'), "is missing. A norm"),
        (Swap('"norm."', '"bias"'), "is cut"),
        (Swap('"norm." in name', '"norm." in name or "emb" in name'), "cut by the vocabulary"),
        (lambda names: names, "one too many"),
        (lambda names: {"bias"}, "none of the names"),
        (nothing, "as a list or a set"),
    ],
    "my_column": [
        (Swap("dist.all_reduce(dx_BSH, group=ctx.group)", "..."), "this rank's part alone"),
        (Swap(f"x_BSH = {AGAIN}\n        dw_HF = x_BSH",
              "dy_BSF = dy_BSF.chunk(t, 1)[rank]\n        dw_HF = x_BsH"),
         "this rank's tokens alone"),
        (Swap("torch.cat(parts, dim=1)", "torch.cat(parts).view(2, -1, 4)"), "whole batches"),
        (Swap("return Column.gather(x_BsH, group) @",
              "ctx.x = Column.gather(x_BsH, group)\n        return ctx.x @", AGAIN, "ctx.x"),
         "kept until backward"),
        (Swap("ctx.save_for_backward(x_BsH, w_HF)",
              "x_BsH = torch.cat([x_BsH, Column.gather(x_BsH, group)], 1)\n"
              "        ctx.save_for_backward(x_BsH, w_HF)\n        x_BsH = x_BsH[:, :3]",
              AGAIN, "x_BsH[:, 3:]"), "kept until backward"),
        (Swap("Column.apply(x_BsH", "Column.apply(x_BsH.detach()"), "has no gradient of x_BsH"),
        (lambda x, w, group: x @ w, "has the shape"),
        (nothing, "Rank 0 returned None"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- tensor_parallel

H, WIDE = 4096, 16384
BYTES = 16 * (2 * H * WIDE // 4 + WIDE // 4 + H)
MEAN_BACK = """
    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            dy = dy / group.size()
            dist.all_reduce(dy, group=group)
            return dy

    x_BSH = Mean.apply(x_BSH)
"""
SUM_BACK = """
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return Sum.backward(ctx, x)

        @staticmethod
        def backward(ctx, dy):
            dy = dy.clone()
            dist.all_reduce(dy, group=group)
            return dy

    return Sum.apply(y_BSH) + bias_H
"""
ENTER, LEAVE = (
    "    x_BSH = tp.copy_to(x_BSH, group)\n",
    "    return tp.reduce_from(y_BSH, group) + bias_H\n",
)
TENSOR_PARALLEL = {
    "tp_bytes": [
        (16 * (2 * H * WIDE + WIDE + H), "one process holds"),
        (16 * (2 * H * WIDE + WIDE + H) / 4, "one of the biases is not divided"),
        (16 * 2 * H * WIDE // 4, "where are the biases?"), (BYTES // 4, "Those are the weights"),
        (12 * BYTES // 16, "one of the two moments"),
        (BYTES / 1e9, "a factor of 10^9: the unit is bytes"),
    ],
    "tp_other_order": [
        (4.5, "SwiGLU has two"), (8, "have of Y in the end"), (9, "gathered, not added up"),
        (17, "what does the right one send?"),
    ],
    "my_ffn_shards": [
        (lambda up, b, down, r, n: (up[r::n], b[r::n], down[:, r::n]), None),
        (nothing, "the shapes None"),
        (Swap("up_FH[own]", "up_FH[:, own]"), "Weights of nn.Linear are [out, in]"),
        (Swap("slice(rank * shard, (rank + 1) * shard)", "slice(0, shard)"), "the same piece"),
        (Swap("down_HF[:, own]", "down_HF[:, :shard]"), "Columns and rows do not match"),
        (lambda up, rank: up, "raised TypeError"),
    ],
    "my_gated_ffn": [
        (nothing, "returned None"),
        (Swap("(y_BSH, group) + bias_H", "(y_BSH + bias_H, group)"), "was added 2 times"),
        (Swap(" + bias_H", ""), "bias was not added"),
        (Swap("tp.reduce_from(y_BSH, group)", "y_BSH"), "nobody added them up"),
        (Swap("group) + bias_H", "group) / group.size() + bias_H"), "were averaged"),
        (Swap("group) + bias_H", "group).detach() + bias_H"), "has no gradient of x"),
        (Swap(ENTER, ""), "nothing that adds up in backward"),
        (Swap(LEAVE, SUM_BACK), "once more than it should be"),
        (Swap(ENTER, MEAN_BACK, LEAVE, SUM_BACK), "2 times too large"),
        (Swap(ENTER, "", "(x_BSH @", "(tp.copy_to(x_BSH, group) @"), "let x enter once"),
    ],
    "my_kv_heads": [
        (nothing, "two lists"),
        (lambda *_: (1, 2), "two lists"),
        (lambda heads, rank: heads, "raised TypeError"),
        (Swap("return held(rank),",
              "return range(kv_heads // size * rank, kv_heads // size * (rank + 1)),"),
         "some have to hold the same one"),
        (Swap("return held(rank),", "return [rank] if size > kv_heads else held(rank),"),
         "Neighbours"),
        (Swap(" if held(r) == held(rank)", ""), "Others hold other heads"),
        (Swap("[r for r in range(size) if held(r) == held(rank)]", "[rank]"),
         "of its own rank alone"),
    ],
    "my_greedy": [
        (nothing, "returned None"),
        (Swap("    number_BS[own", "    return number_BS\n    number_BS[own"),
         "own likeliest entry"),
        (Swap(" + dist.get_rank(group) * v", ""), "begin at r v"),
        (Swap("    number_BS[own",
              "    dist.all_reduce(number_BS)\n    return number_BS\n    number_BS[own"),
         "were added up"),
        (Swap("dist.get_world_size(group) * v", "-1", "ReduceOp.MIN", "ReduceOp.MAX"),
         "one process takes the smallest"),
        (lambda x, group: gathered(x, group, -1).argmax(-1), "do without sending logits"),
    ],
    "my_degree": [
        (nothing, "returned None"),
        (lambda config, limit, node: 4 if limit > 70e9 else None, "One divides and fits"),
        (Swap("return None", "return 0"), "None fits, thus None"),
        (lambda *_: 1, "That does not fit"),
        (lambda *_: 8, "A smaller one fits as well"),
        (lambda *_: 16, "share no fast link"),
        (lambda config, *_: 4 if config.hidden > 2000 else 3, "divide key-value heads"),
        (Swap("config.ffn_width, config.vocab", "config.ffn_width"), "It does not divide vocab"),
        (Swap("config.key_value_heads, ", ""), "raised ValueError: tp=3"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- parity

FOUR = {"A": "decay", "B": "share", "C": "clip", "D": "counts"}
PARITY = {
    "times_allowed": [
        (1.9e-3 / 2.1e-7, "twelve times the noise is still allowed"),
        (1.9e-3 / 2.1e-7 / 3, "the largest counts"),
        (2.52e-6, "That is what is allowed"),
        (7000, "too large"),
        ("many", "should be a number of times"),
    ],
    "four_reports": [
        ({**FOUR, "A": "seed"}, "before the first step"),
        ({**FOUR, "A": "clip", "C": "decay"}, "not alike"),
        ({**FOUR, "B": "counts"}, "another factor on each rank"),
        ({**FOUR, "C": "bucket"}, "some parameters alone"),
        ({**FOUR, "D": "share"}, "rows of the batch"),
        ({**FOUR, "D": "else"}, "Allowed are share, counts"),
        ({"A": "decay"}, "a dictionary with"),
    ],
    "my_cut": [
        (nothing, "raised TypeError"),
        (lambda size, total, first: [], "it proposes nothing"),
        (lambda size, total, first: [torch.arange(size + 1)], "a tensor of 8 row numbers"),
        (Swap("pairs[:, (first + r) % n]", "pairs[:, r]"), "Begin with it"),
        (lambda size, total, first: [torch.arange(total)[first :: total // size]], "are not among"),
        (
            lambda size, total, first: [
                torch.arange(total).view(-1, 2)[first :: total // size].flatten()
            ],
            "every row once",
        ),
    ],
    "my_program": [
        (Swap("total / count", "total / (y != -100).sum() / size"), "over a rank's own count"),
        (Swap("dist.all_reduce(p.grad)", "..."), "gradient of 4.bias"),
        (Swap("parameters(), 0.1)\n        opt", "parameters(), 0.2)\n        opt"), "same factor"),
        (Swap("watch(model, optimizer)", "..."), "never called watch"),
        (lambda watch: 1 / 0, "It failed on 2 ranks"),
    ],
    "own_parity": [
        (True, "is what parity.check returns"),
        (parity.Report(1, compared=50), "That was one rank"),
        (parity.Report(2, compared=3), "Only 3 tensors"),
        (
            parity.Report(
                2, findings=[parity.Finding(parity.Key(0, "update", "w"), [1], "is zero")]
            ),
            "Not yet the same: step 1, update of w, rank 1",
        ),
        (parity.Report(4, compared=50), None),
    ],
}


# ------------------------------------------------------------------------------- tensor_types

WORDS = {"norm": "RR", "norm's gradient": "PP", "up": "RV", "up's gradient": "PV", "tokens": "VR"}
PLAN = {
    "copy_to forgotten": "types",
    "loss divided by N twice, before backward": "loss",
    "a rank's tokens begin at position 0": "loss",
    "gradients of norms not summed, sequence cut": "types",
    "each epoch in the same order": None,
    "gradients averaged over tp in place of dp": "types",
}
TENSOR_TYPES = {
    "type_words": [
        ({**WORDS, "norm": "RI"}, "a rank's norm sees its own tokens alone"),
        ({**WORDS, "norm": "VR"}, "V on dp it is not"),
        ({**WORDS, "norm's gradient": "PR"}, "The tensor is R there"),
        ({**WORDS, "up's gradient": "PP"}, "The tensor is V there"),
        ({**WORDS, "tokens": "VV"}, "look at the same tokens"),
        ({**WORDS, "up": "R"}, "A pair of the words"), ({"norm": "RR"}, "A pair of the words"),
    ],
    "my_operator": [
        (Swap("torch.cat(parts,", "torch.cat(parts[::-1],"), "the value changes"),
        (Swap("return total.", "return (total / ctx.group.size())."),
         "addends have to be added up"),
        (Swap("dist.all_reduce(total, group=ctx.group)", "..."), "Its words are V -> I"),
        (copy_to, "Its words are I -> R"),
        (Swap("GatherForAll.apply(x,", "GatherForAll.apply(x.detach(),"), "gets no gradient"),
        (nothing, "returned no tensor"),
        (lambda x, group: 1 / 0, "ZeroDivisionError"),
    ],
    "my_sum": [
        (Swap("len(found) == 1", "len(found) == 1 and words[0] != 'P'"), "Addends of two sums"),
        (lambda words: "I" if "I" in words else words[0], "I's gradient"),
        (Swap('"V" if found', "None if found"), "the rank's own"),
        (Swap('    return "V"', "    return 'P' if 'P' in found and 'I' not in found else \"V\""),
         "once by"),
        (lambda words: "I" if words == ["I"] else None, "Like goes with like"),
        (lambda words: "X", "one of the words"),
        (lambda words: words[9], "raised IndexError"),
    ],
    "my_network": [
        (Swap("copy_to(scale, group)", "scale"), "gradient of scale is not one process's"),
        (Swap("copy_to(x, group)", "x"), "linear(x tp:I, gate tp:V)"),
        (Swap("F.linear(y, down), group) + bias", "F.linear(y, down) + bias, group)"),
         "output of rank 0"),
        (Swap("reduce_from(F.linear(y, down), group)", "F.linear(y, down)"), "output of rank 0"),
        (nothing, "no result of x's shape"),
    ],
    "type_plan": [
        ({**PLAN, "copy_to forgotten": "gradients"}, "something cheaper does"),
        ({**PLAN, "copy_to forgotten": "loss"}, "x is I and meets"),
        ({**PLAN, "each epoch in the same order": "loss"}, "Each single step is right"),
        ({**PLAN, "copy_to forgotten": 1}, "Allowed are 'types'"), ({}, "for each mistake"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- train

SCRIPT = Path(__file__).resolve().parents[1] / "code/shardlab/train"
LACKS = {"A": "sampler", "B": "set_epoch", "C": "all_reduce", "D": "wrapper"}
TRAIN = {
    "my_ddp_script": [
        (3, "the path of your script"), ("none.py", "allowed are scripts"),
        (SCRIPT / "sampler.py", "Step 10, the loss of all ranks: Rank 0 prints"),
    ],
    "my_fsdp_script": [
        (SCRIPT / "core.py", "Of 17 steps 15 are made. Step 16, FSDP2"),
    ],
    "validation_filled_up": [
        (5.5, "That is the right mean"), (4.5, "repeats two instead"),
        (74 / 12, "begins anew at the first"), (6.5, "out of how many"),
    ],
    "my_mean": [
        (Swap("[total, count]", "[total / max(count, 1), 1.0]"), "mean of the ranks' means"),
        (Swap("(both[0] / both[1])", "both[0]"), "sum of all losses"),
        (Swap("(both, group=group)", "(both)"), "the mean over all ranks"),
        (lambda total, count, group: total / max(count, 1), "off by"),
        (nothing, "returned None"),
    ],
    "my_rest": [
        (Swap("done * batch :", ":"), "read again"),
        (Swap(": full]", ":]"), "is to be dropped"),
        (Swap("[rank::size]", "[(n := (full - done * batch) // size) * rank :][:n]"),
         "other windows than one process"),
        (Swap("[rank::size]", "[: len(order) // size]"), "the same window"),
        (Swap("[rank::size]", "[rank::size][:-1]"), "windows are read in all"),
        (nothing, "A list is due"),
    ],
    "states_of_a_job": [
        ({"ddp": 20.8, "fsdp2": 20.8}, "FSDP2 divides"),
        ({"ddp": 5.2, "fsdp2": 2.6}, "the weights alone"),
        ({"ddp": 2.6, "fsdp2": 2.6}, "With DDP nothing is divided"),
        ({"ddp": ..., "fsdp2": 2.6}, "no answer for 'ddp' yet"),
        (20.8, "a dictionary with 'ddp', 'fsdp2'"),
    ],
    "missing_lines": [
        (LACKS | {"A": "wrapper", "D": "sampler"}, "up to which step are the weights right"),
        ({"A": "sampler"}, "a dictionary with"), (LACKS | {"B": "epoch"}, "Allowed are sampler"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- trainers

TRAINERS = {
    "lightning_steps": [
        (256, "a rank's"), (1024, "shares out"), (16, "1,024 windows"),
    ],
    "my_decision": [
        (Swap("dist.all_reduce(bad, dist.ReduceOp.MAX, group)", "..."), "their scales differ"),
        (Swap("ReduceOp.MAX", "ReduceOp.MIN"), "all ranks make the step"),
        (Swap("float(any(not g.isfinite().all() for g in gradients))",
              "sum(g.sum() for g in gradients) + 0.0", "dist.ReduceOp.MAX", "dist.ReduceOp.SUM",
              "not bad.item()", "bool(bad.isfinite())"), "they should make it"),
        (nothing, "return a bool"),
    ],
    "skipped_steps": [
        (16, "a hysteresis of 2"), (15, "both overflow"), (18, "is forgiven"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- checkpoint


def pieces(theirs_from="theirs", directions=2, empty=False):
    """An answer to `my_pieces`, right unless told otherwise."""

    def answer(saved, offset, size):
        plan = []
        for file, corner, extent in saved:
            both = list(zip(offset, size, corner, extent, strict=True))
            cuts = [(max(a, b), min(a + n, b + m)) for a, n, b, m in both]
            for i in range(directions, 2):  # forgotten: takes all that there is
                cuts[i] = (offset[i], offset[i] + size[i])
            if all(low < high for low, high in cuts) or empty:
                start = {"theirs": corner, "whole": (0, 0), "mine": offset}[theirs_from]
                cut = [
                    tuple(slice(a - c, max(a, b) - c) for (a, b), c in zip(cuts, at, strict=True))
                    for at in (start, offset)
                ]
                plan.append((file, *cut))
        return plan

    return answer


def first_rows(saved, offset, size):
    """As many rows and columns as are wanted, but always the first of each file."""
    return [
        (file, tuple(slice(0, s.stop - s.start) for s in theirs), mine)
        for file, theirs, mine in pieces()(saved, offset, size)
    ]


HELPER = """
    def flushed():
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    flushed()
"""
INSIDE = """    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
"""
CHECKPOINT = {
    "checkpoint_bytes": [
        (16 * 8.03e9, "Gradients are computed anew"), (4 * 8.03e9, "Those are the weights alone"),
        (8 * 8.03e9, "one of AdamW's two averages"), (12 * 8.03, "10^9: the unit is bytes"),
        (12 * 8.03e9 / 8, "That is what one rank writes"), (1e9, "is too small"),
    ],
    "checkpoint_interval": [
        ((90 * 180_000) ** 0.5, "A factor is missing under the root"),
        ((2 * 90 * 50) ** 0.5, "In seconds, please"),
        (180_000, "That is the time between failures"),
    ],
    "my_write": [
        (Swap(INSIDE, HELPER), None),
        (Swap('f"{path}.new"', "path"), "leaves a file of 0 bytes, neither the old content nor"),
        (Swap("    os.replace", "    path.unlink(missing_ok=True)\n    os.replace"),
         "no file at all"),
        (Swap("os.fsync(file.fileno())", "..."), "a machine that loses power can"),
        (Swap('"wb"', '"xb"'), "the next one raised FileExistsError"),
        (nothing, "does not leave the new content"),
    ],
    "my_windows": [
        (lambda s, b, r, n: range(s + r, s + b, n), None),
        (Swap("samples + ", ""), "beginning of the data again"),
        (Swap("batch // size", "batch"), "instead of 2: the batch is that of"),
        (lambda s, b, r, n: range(s, s + b // n), "Some windows go to two ranks"),
        (nothing, "There is no answer yet"),
    ],
    "my_pieces": [
        (lambda *given: pieces()(*given)[::-1], None),
        (pieces(empty=True), "nothing in 2.pt is of use: leave it out"),
        (pieces("whole"), "is nothing of 1.pt, whose box begins at (2, 0)"),
        (pieces("mine"), "is nothing of 1.pt, whose box begins at (2, 0): is it counted from"),
        (pieces(directions=1), "have not the same size: each is counted from the corner"),
        (lambda *given: pieces()(*given)[:1], "numbers are not read"),
        (first_rows, "other numbers than those of the whole matrix"),
        (nothing, "There is no answer yet"),
        (lambda saved: [], "raised TypeError"),
    ],
    "my_save_interval": [
        (Swap(", size / write)", ", 0)"), "there is a shortest interval, too"),
        (lambda size, ranks, copy, write, mtbf: size / write, "more often than it pays"),
        (Swap("size / ranks_ / copy", "size / copy"), "Each rank copies its own share"),
        (Swap("size / ranks_ / copy", "size / write"), "only the copy holds it up"),
        (Swap("ranks_ / copy", "ranks_ / copy + size / write"), "only the copy holds it up"),
        (Swap("2 * held_up", "held_up"), "A factor is missing under the root"),
        (Swap("* mtbf", "* mtbf / ranks_"), "that of the whole job already"),
        (Swap("2 * held_up", "3 * held_up"), "is too large"),
        (lambda *_: "often", "should be a number"),
        (lambda size: size, "raised TypeError"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- cluster

UNEVEN = {"rank": 2, "collective": "all_reduce", "line": 17}
ORDER = {"rank 0": "norm", "rank 1": "loss"}
TENSOR = {"runs": "zero3", "rank": 1, "collective": "all_gather", "line": 27}
JOB = 'int(slurm["SLURM_JOB_ID"])'
PORT = f"20000 + {JOB} % 10000"
CLUSTER = {
    "cluster_ranks": [
        ((8, 2, 3), "count from 0"), ((9, 1, 2), "two ranks, not four"),
        ((7, 7, 2), "on the rank's own node"), ((7, 1, 7), "GROUP_RANK is the node's number"),
        ((6, 1, 2), "how many ranks come before it"), (7, "Three numbers"),
    ],
    "cluster_batch": [
        ({3, 8, 9, 12}, "Line 12 is right"), ({8, 9, 11}, "3 of four. How many launchers"),
        ({3, 9, 11}, "3 of four. Where does sbatch stop"),
        ({3, 8, 11}, "3 of four. Who else gets SIGUSR1"),
        ({3, 8, 9}, "3 of four. Which machine is meant"), ({13}, "A set of four numbers"),
        (3, "A set of four numbers"),
    ],
    "my_ranks": [
        (Swap(PORT, f"1024 + {JOB} % 30000"), None),
        (Swap('int(slurm["SLURM_PROCID"])', 'slurm["SLURM_PROCID"]'), "variables are text"),
        (Swap("local % gpus if gpus else None", "local"), "sees 0 GPUs: device is None"),
        (Swap("local % gpus", "local"), "A task that sees one GPU calls it 0"),
        (Swap("names[0]", 'names[int(slurm["SLURM_NODEID"])]'), "'node7'"),
        (Swap("names[0]", '"localhost"'), "'node7', and not 'localhost'"),
        (Swap(PORT, "29500"), "the same port"),
        (Swap(PORT, JOB), "allowed are 1024"),
        (Swap(PORT, '20000 + int(slurm["SLURM_PROCID"])'), "get different ports"),
        (nothing, "A dictionary"),
    ],
    "hang_uneven": [
        (UNEVEN | {"rank": 0}, "where all should be"),
        (UNEVEN | {"collective": "barrier"}, "where the missing rank waits"),
        (UNEVEN | {"line": 25}, "calls a function"),
        (UNEVEN | {"line": 28}, "where the missing rank stands"),
        (UNEVEN | {"line": []}, "Read the last call of each rank"), (2, "is a dictionary with"),
    ],
    "hang_order": [
        (ORDER | {"rank 0": "loss"}, "has finished all of its calls"),
        (ORDER | {"rank 1": "norm"}, "has not called anything"),
    ],
    "hang_tensor": [
        (TENSOR | {"runs": "tensor"}, "That is what it says"),
        (TENSOR | {"runs": "ddp"}, "gathers nothing"),
        (TENSOR | {"runs": "zero1"}, "gathers once a step"),
        (TENSOR | {"rank": 0}, "has a sequence more"),
        (TENSOR | {"collective": "reduce_scatter"}, "All of these are done"),
        (TENSOR | {"line": 28}, "and finished"),
        (TENSOR | {"line": 99}, "Read the last call of each rank"),
        (TENSOR | {"line": ...}, "no answer for 'line' yet"),
        (TENSOR | {"else": 1}, "is a dictionary with"),
    ],
    "cluster_culprit": [
        (Swap("if all(", "if any("), "All links of rank 4 are slow"),
        (Swap("return rank", "return rank or None"), "0 is a rank, too"),
        (lambda links: min(links, key=lambda link: link[2])[0], "rank 4"),
        (Swap("return None", "return 0"), "a cable"),
        (Swap("if all(", "if 1 < sum("), "Two of 3's links"),
    ],
    "cluster_rounds": [
        (lambda n: [[pair] for pair in combinations(range(n), 2)], "4 ranks need 3 rounds"),
        (lambda n: [[(a, a ^ d) for a in range(n)] for d in range(1, n)], "be in it once"),
        (lambda n: [[(a, a ^ 1) for a in range(0, n, 2)]] * (n - 1), "2 pairs meet, of 6"),
        (nothing, "A list of rounds"),
        (lambda n: 1 / 0, "raised ZeroDivisionError"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- elastic

ELASTIC = {
    "my_first_ranks": [
        (Swap("sum(sizes[:node])", "sum(sizes[: node + 1])"), "Ranks 0 to 3 are on the first"),
        (Swap("sum(sizes[:node])", "node * sizes[0]"), "4 and 5 on the second"),
        (nothing, "a list of ranks"),
    ],
    "my_silent": [
        (Swap("last[agent][0] != beat", "True"), "though the host has read it again"),
        (Swap("> patience", ">= patience"), "2 s are not more than 2 s"),
        (Swap("last[agent][0] != beat", "last[agent][0] < beat"), "smaller than before"),
        (nothing, "returned None, which should be the agents, as a set"),
        (lambda seen: seen, "raised TypeError"),
    ],
    "my_cause": [
        (Swap("one[2] in (0, 4, 6, 7, 8, 11)", "False"), "killed with SIGKILL"),
        (Swap("(0, 4, 6, 7, 8, 11)", "(0, 6)"), "SIGSEGV is rank 1's own"),
        (Swap("if one[2] != 15", ""), "ended by its agent"),
        (Swap("in (0, 4, 6, 7, 8, 11)", "== 0"), "counts like an error"),
        (Swap("(one[2] in (0, 4, 6, 7, 8, 11), one[0])", "one[2] != 9"), "the earliest"),
        (lambda failures: failures[0][1], "the earliest"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- deepspeed_engine

SECONDS = 4 * 2.5 / 3600 * 16  # of four GPUs, in money
PRICE = SECONDS / 2048 * 1e6
SECTION: dict[str, Any] = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 125_000}
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": SECTION,
    "zero_allow_untested_optimizer": True,
}


def settings(without="", **changes):
    changed = SETTINGS | changes
    return {name: value for name, value in changed.items() if name != without}


def section(**changes):
    return settings(zero_optimization=SECTION | changes)


DEEPSPEED_ENGINE = {
    "deepspeed_accumulation": [
        (2, "only the copies count"), (4, "pipeline stages"), (8, "tensor-parallel ranks"),
        (128, "several copies"), (17, "is too large"),
    ],
    "deepspeed_cost": [
        (0.278, None), (2.5 * 50 / 3600, "All eight GPUs"), (8 * 2.5 * 50, "for an hour"),
        (8 * 8 * 2.5 * 50 / 3600, "all eight GPUs together"),
        (3600 / (8 * 2.5 * 50), "other way up"),
    ],
    "deepspeed_log": [
        (["data", 2048.0, 21.7], None), ("data", "Give three things"), (2048, "Give three things"),
        (("data", 2048), "Give three things"), (("data", 2048, ...), "still missing"),
        (("tensor", 2048, PRICE), "asked for it"),
        (("zero3", 2048, PRICE), "a quarter of the weights"),
        (("pipeline", 2048, PRICE), "a quarter of the layers"),
        (("DDP", 2048, PRICE), "allowed are 'data'"),
        ((["data"], 2048, PRICE), "allowed are 'data'"),
        (("data", 16384, PRICE), "counts the input"),
        (("data", 18432, PRICE), "begins with the input"), (("data", 512, PRICE), "one rank's"),
        (("data", 64, PRICE), "one sequence"), (("data", "2048", PRICE), "number"),
        (("data", 2048, PRICE / 4), "pays for one GPU"), (("data", 2048, 0.68), "the log's"),
        (("data", 2048, SECONDS / 16384 * 1e6), "tokens of the input"),
        (("data", 2048, SECONDS / 18432 * 1e6), "input and output together"),
        (("data", 2048, SECONDS / 2048), "10^6: the unit is per million tokens"),
        (("data", 2048, PRICE * 3600), "for an hour"),
    ],
    "my_accumulation": [
        (lambda train, micro, world, *_: train // (micro * world),
         "share a copy of the model count"),
        (Swap("if rest or not steps", "if False"), "raise ValueError rather than"),
        (Swap("return steps", "return float(steps)"), "DeepSpeed wants an int"),
        (nothing, "returned None"),
        (lambda *_: 1 / 0, "ZeroDivisionError"),
    ],
    "deepspeed_config": [
        (settings(train_batch_size=4), None),
        (settings("gradient_clipping"), "when it is not told"),
        (settings(zero_optimization={"stage": 1}), "stage is 1 instead of 2"),
        (settings("gradient_accumulation_steps"), "after 1 micro-batches instead of 2"),
        (settings(gradient_cliping=0.0), "perhaps meant: 'gradient_clipping'"),
        (settings(bf16={"enabled": True}), "float32 was asked for"),
        (section(overlap_comm=False), "Communication does not overlap"),
        (section(reduce_bucket_size=500_000_000), "take 4,000.0 MB instead of 0.5 to 1"),
        (section(reduce_bucket_size=250_000), "With overlap there are two of them"),
        (section(reduce_bucket_size=1_000_000), "counts numbers, not bytes"),
        (section(reduce_bucket_size=10_000), "take 0.1 MB"), ("ds_config.json", "should be a dict"),
    ],
    "my_choice": [
        (Swap("0.7 * gpu", "gpu"), "more than 70 % of it"),
        (Swap("gpus * states.host", "states.host"), "share its memory"),
        (Swap('range(4)] + [(3, "parameters")]', "range(3, -1, -1)]"), "something earlier"),
        (Swap(' + [(3, "parameters")]', ""), "There is a setting that fits"),
        (lambda *_: 5, "should be one of"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- pipeline


def without_gradients(part, x_BH, y_BH, m, *_):
    for x in x_BH.chunk(m):
        part(x).backward()


def greedy(costs, parts):
    layers, held, part = [0] * parts, 0.0, 0
    for i, cost in enumerate(costs):
        full = layers[part] and held + cost > sum(costs) / parts
        if part < parts - 1 and (full or len(costs) - i <= parts - 1 - part):
            part, held = part + 1, 0.0
        layers[part] += 1
        held += cost
    return layers


def for_ever(orders):
    while True:
        pass


AHEAD = "ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages"
RETURN = "return order + backwards[len(forwards) - ahead :]"
LAST = "F.mse_loss(out, y) / m"
EVEN = "[len(costs) // parts + (i < len(costs) % parts) for i in range(parts)]"
PIPELINE = {
    "pipeline_bubble": [
        (0.18, None), (32 / 39, "in which a stage works"),
        (7 / 32, "idle time beside working time"), (8 / 39, "how many stages come before"),
        (7 / 40, "how many slots"), (7 / 8, "without micro-batches"),
        (1 / 8, "without micro-batches"), (14 / 39, "Twice too much"),
        (17.9, "In percent it is right"), ("18 %", "should be a number"),
    ],
    "my_interleaved": [
        (nothing, "should be a list"),
        (lambda *_: ..., "should be a list"),
        (lambda *_: [0, 1], "should be a list"),
        (lambda *_: [], "F0.0 is missing"),
        (lambda stage: [], "raised TypeError"),
        (Swap(AHEAD, "ahead = stages - 1 - stage"), "1F1B's number"),
        (Swap(AHEAD, "ahead = microbatches * chunks"), "All forwards come"),
        (Swap("2 * (stages - 1 - stage)", "2 * stage"), "counted from the wrong end"),
        (Swap("reversed(range(chunks))", "range(chunks)"), "Backward begins with the last"),
        (Swap("microbatches, stages)", "microbatches, microbatches)", "first + stages)",
              "first + microbatches)"), "as many micro-batch"),
        (Swap("microbatches, stages)", "microbatches)", "first + stages)", "first + 1)"),
         "Micro-batches go in groups"),
        (Swap(AHEAD, "ahead = 12"), "comes at the wrong time"),
        (Swap(RETURN,
              f'{RETURN[:7]}[f"{{a[0]}}{{int(a[1:-2]) + 1}}{{a[-2:]}}" for a in {RETURN[7:]}]'),
         "no pass of micro-batches 0 to 7 and chunks 0 to 1"),
        (Swap(RETURN, f"return [a[:2] for a in {RETURN[7:]}]"), "a micro-batch and a chunk"),
        (Swap(RETURN, f"return ({RETURN[7:]})[:-1]"), "B7.0 is missing"),
        (Swap(RETURN, f'{RETURN} + ["B0.0"]'), "more than once"),
        (Swap(RETURN, f"return ({RETURN[7:]})[::-1]"), "B0.0 stands before F0.0"),
    ],
    "my_live": [
        (nothing, "returned None"),
        (Swap("return most", "return live"), "most at any time"),
        (lambda order: sum(a[0] == "F" for a in order), "gives activations back"),
        (Swap('"W": -1', '"W": 0'), "What ends them then?"),
        (Swap('"I": 0, "W": -1', '"I": -1, "W": 0'), "I does not end them"),
        (Swap('"I": 0', '"I": -1'), "I does not end them"),
        (lambda order: 1, "returned 1"),
    ],
    "my_balance": [
        (Swap("parts)[1]", "parts)[1] or None"), None),
        (Swap("return best(len(costs), parts)[1]", "return tuple(best(len(costs), parts)[1])"),
         None),
        (nothing, "should be a list"),
        (Swap("return best(len(costs), parts)[1]", f"return {EVEN}"), "Layers are counted here"),
        (greedy, "fills one part after another"),
        (lambda costs, parts: [len(costs)], "should be 4 numbers"),
        (lambda costs, parts: [1] * parts, "8 layers in all"),
        (lambda costs, parts: [len(costs)] + [0] * (parts - 1), "without work"),
    ],
    "my_1f1b": [
        (lambda *_: ..., "never went backward"),
        (Swap(LAST, "F.mse_loss(out, y)"), "sum of 8 means is 8 times"),
        (Swap("out.backward(dy)", "out.backward(dy if dy is None else torch.ones_like(dy))"),
         "went backward from ones"),
        (Swap("out.backward(dy)", "part.zero_grad()\n        out.backward(dy)"),
         "last micro-batch alone"),
        (Swap(".requires_grad_(stage > 0)", ""), "requires_grad_()"),
        (without_gradients, "Only the last stage has a loss"),
        (Swap("min(stages - 1 - stage, m)", "m", "receive(kept[0][1], stage + 1)",
              "receive(kept[0][1], stage + 1) if stage < stages - 1 else None",
              "send(forward(x, ys[i]), stage + 1)",
              "out = forward(x, ys[i])\n        stage < stages - 1 and send(out, stage + 1)"),
         "That is GPipe"),
        (Swap("if stage % 2 == 0", "if True"),
         "one has to send first"),
        (Swap("if stage % 2 == 0", "if False"), "one has to send first"),
    ],
    "my_deadlock": [
        (nothing, "should be a dict"),
        (lambda orders: [], "should be a dict"),
        (lambda orders: {}, "name all that stand"),
        (Swap("moved = True\n", "moved = False\n"), "goes on once another"),
        (Swap("if need[0] >= 0 and", 'if need[0] >= 0 and action[0] == "F" and'),
         "name all that stand"),
        (Swap("if need[0] >= 0 and", 'if need[0] >= 0 and action[0] == "B" and'),
         "name all that stand"),
        (Swap('need = (stage, "F" + action[1:])', "need = (-1, action)"), "waits for its forward"),
        (Swap("if i < len(order)}", "if i < len(order) and s == 0}"), "name all that stand"),
        (lambda orders: orders[9], "raised IndexError"),
        (for_ever, "Does its loop end"),
    ],
    "my_microbatches": [
        (nothing, "returned None"),
        (Swap("batch % m == 0 and ", ""), "divides the batch"),
        (Swap("range(1, batch + 1)", "range(batch, 0, -1)"), "smallest m"),
        (Swap("/ (m + stages - 1)", "/ m"), "share of the whole step"),
        (Swap("min(stages, m) * batch / m", "batch"), "up to p micro-batches"),
        (Swap("min(stages, m) * batch / m", "0"), "up to p micro-batches"),
        (Swap("min(stages, m) * batch / m", "batch / m"), "up to p micro-batches"),
        (Swap("min(stages, m)", "stages"), "fewer micro-batches than stages"),
        (lambda p, batch, *_: batch if p != 16 else 96, "returned 64"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- memory


def sum_of_parts(config, limit):
    batch = 0
    while memory.estimate(config, Layout(micro_batch=batch + 1)).total <= limit:
        batch += 1
    return batch


def one_too_many(config, limit):
    batch = 1
    while memory.estimate(config, Layout(micro_batch=batch)).peak <= limit:
        batch += 1
    return batch


def detached(model, batches):
    with torch.inference_mode():
        losses = [loss(model(x), y).detach() for x, y in batches]
    return torch.stack(losses).mean()


def at_the_end(model, tokens, targets):
    pairs = zip(tokens.chunk(4), targets.chunk(4), strict=True)
    (sum(loss(model(x), y) for x, y in pairs) / 4).backward()


NARROW = 'if precision == "bf16" and optimizer == "adamw": moments = 0\n    return params'
STEP = "(loss(model(x), y) / 4)"
MEMORY = {
    "state_gigabytes": [
        (3, "the weights in bfloat16 alone"), (6, "The optimizer keeps three float32 numbers"),
        (9, "Count the parts"), (12, "eight bytes each"), (18, "The optimizer alone"),
        (27, "gradients in float32"), (24e9 / 2**30, "number of GiB"),
        (24e9, "10^9: the unit is GB"), (48, "48 GB is too large"),
    ],
    "largest_model": [
        (5.0, "activations need their 20 GB"), (30, "can be loaded, not trained"),
        (15, "AdamW needs more"), (3.333, "gradients in float32"),
        (3.75e9, "10^9: the unit is billion parameters"), (2, "2 billion parameters is too small"),
    ],
    "my_states_bytes": [
        (Swap("gradient + master", "gradient"), "have its float32 copy of the weights?"),
        (Swap('0 if precision == "fp32" else 4', "4"), "In float32 the weights need no second"),
        (Swap('{"sgd": 0, "momentum": 1, "adamw": 2}[optimizer]', "2"), "SGD keeps no moments."),
        (Swap("return params", NARROW), "Two moments of four bytes each"),
        (Swap('"momentum": 1', '"momentum": 0'), "Momentum is one float32 number"),
        (lambda *_: "16", "returned '16'; it should be a number"),
        (lambda params: 16 * params, "raised TypeError"),
    ],
    "my_largest_batch": [
        (sum_of_parts, "one sequence more would still fit"), (one_too_many, "more than there is"),
        (Swap("return batch", "return max(batch, 1)"), "Not even the states fit there: the answer"),
        (lambda config, limit: limit / memory.activations(config).total, "a whole number"),
    ],
    "my_evaluate": [
        (detached, None),
        (Swap("with torch.no_grad()", "if True", ".item()", ""), "kB more are held"),
        (Swap("with torch.no_grad()", "if True"), "autograd still saves activations"),
        (Swap(" / len(losses)", ""), "That is their sum"),
        (Swap("return sum(losses) / len(losses)", "return losses"), "expected is the mean loss"),
    ],
    "my_backward": [
        (Swap("chunk(4)", "chunk(8)", "/ 4", "/ 8"), None),
        (lambda model, x, y: loss(model(x), y).backward(), "MB are enough for two sequences"),
        (at_the_end, "before the next piece's forward begins"),
        (Swap(" / 4", ""), "about 4 times as long"),
        (Swap(STEP, f"model.zero_grad()\n        {STEP}"), "The gradient is off by up to"),
        (nothing, "did a backward run on every piece"),
    ],
    "my_micro_batch": [
        (Swap("microbatches=batch // size", "microbatches=1"), "are there from the start"),
        (Swap(" if batch % size == 0", "", "batch // size", "-(-batch // size)"),
         "Pieces of 5 do not share out 12 evenly"),
        (Swap('("none", "full")', '("full", "none")'), "computes a third more"),
        (Swap("needs.peak", "needs.total"), "Compare the peak with the limit"),
        (Swap('("none", "full")', '("none",)'), "There is a way"),
        (Swap("return None", 'return 1, "full"'), "It needs 131 MB at its peak"),
        (lambda config, batch, limit: batch, "should be (1 to 12 sequences, 'none' or 'full')"),
        (lambda config, batch, limit: (batch / 2, "none"), "should be (1 to 12"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- mesh

SKIP = 'name != "head.weight" and (name in cut or first)'
MESH = {
    "my_groups": [
        (nothing, "returned None, which should be three lists"),
        (Swap("return data, stages, tensor", "return data, stages"), "should be three lists"),
        (Swap("return data,", "return data[::-1],"), "they should ascend"),
        (Swap("rank % t, rank // t % p, rank // (p * t)",
              "rank // (d * p), rank // d % p, rank % d", "part + t * stage + p * t * i",
              "i + d * stage + d * p * part", "part + t * i + p * t * copy",
              "copy + d * i + d * p * part", "i + t * stage + p * t * copy",
              "copy + d * stage + d * p * i"), "it is innermost"),
        (lambda r, d, p, t: [[r]] * 3, "The data group has 1 ranks; there are d=2"),
        (lambda r, d, p, t: [[r + 1, r + 2]] * 3, "does not hold the rank itself"),
        (lambda rank: None, "raised TypeError"),
    ],
    "mesh_budget": [
        ("--dp 8 --zero 3", None), ("--tp 2", "There are 6 ranks left"),
        ("--dp 8 --zero 1", "In ZeRO's stage 1 copies hold something whole"),
        ("--tp 4 --hidden 32", "Leave the model as it is"),
        ("--dp 4 --tp 4 --zero 3 --batch 16", "That takes 16 ranks; there are 8"),
        ("--tp 3", "The command refuses it: heads=4"), ("--warp 9", "The command"),
        (2, "a line of options"),
    ],
    "my_norm": [
        (nothing, "Return a scalar tensor"),
        (Swap("dist.all_reduce(square, group=groups.tp)", "...",
              "dist.all_reduce(square, group=groups.pp)", "..."), "add them up over both groups"),
        (Swap(SKIP, "True"), "and the twin as well"),
        (Swap(SKIP, "name in cut or first"), "The tied embedding counts twice"),
        (Swap(SKIP, 'name != "head.weight"'), "counts t times"),
    ],
    "my_mesh": [
        (nothing, "returned None, which should be a Layout"),
        (lambda *_: 8, "should be a Layout"),
        (lambda *_: Layout(tp=4, zero=1), "That is no Layout of 8 ranks"),
        (lambda *_: Layout(tp=8, zero=1), "heads=4"),
        (Swap('float("inf")', "-1", "< least", "> least"), "are enough"),
        (Swap("> limit", "> 1e99"), "A rank holds too much"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- strategy

LINK = 4 * 2 * 7 * 2 * 989e12 / (6 * 12 * 8192)
DAYS = 6 * 8e9 * 15e12 / (512 * 989e12 * 0.4) / 86400


def averaged(layers):
    """The smallest layers' mean, as launch, and the largest ones', as rate."""
    layers = sorted(layers)
    return mean(s for _, s in layers[:4]), mean(w / s for w, s in layers[-4:])


def stages(**changes):
    return Layout(**{"tp": 8, "pp": 8, "microbatches": 256, "sequence_parallel": True} | changes)


STRATEGY = {
    "strategy_wire": [
        (LINK / 2, "twice"), (LINK / 8, "the all-reduces are not"), (LINK * 8 / 7, "7/8"),
        (LINK * 3, "Backward counts"), (LINK / 4, "four all-reduces"),
        (LINK / 1e9, "10^9: the unit is bytes per second"),
    ],
    "strategy_days": [
        (DAYS * 86400, "seconds"), (DAYS / 3, "forward alone"), (DAYS * 0.4, "takes longer"),
        (DAYS * 8 / 6, "Nothing is recomputed"),
    ],
    "strategy_corner": [
        (averaged, "Do slow runs"),
        (Swap("rate = max(operations / seconds for operations, seconds in layers)",
              "rate = sum(o / s for o, s in layers) / len(layers)"), "small layers"),
        (Swap("return launch, rate", "return rate, launch"), "other order"),
        (nothing, "should return (launch, rate)"),
        (lambda layers: ("fast", 1), "launch should be a number"),
        (3, "should be a function"),
    ],
    "strategy_layout": [
        (stages(dp=2, pp=4, microbatches=128), None), ((8, 8), "should be a strategy.Layout"),
        (stages(pp=4), "there are 64 GPUs"), (stages(microbatches=64), "a step has 256"),
        (stages(tp=1, pp=64), "cannot be cut"), (Layout(64, microbatches=4), "are model states"),
        (stages(dp=8, pp=1, zero=3, microbatches=32), "waits of the copies"),
        (stages(pp=8, recompute="full"), "done twice"),
    ],
}  # fmt: skip

# ------------------------------------------------------------------------------- model_parallelism

GOOD = {"dp": 8, "tp": 4, "pp": 2, "zero": 1, "microbatches": 64, "sequence_parallel": True}


def laid_out(**changes):
    return Layout(**GOOD | changes)


ONCE = "once = 2 * params * (d - 1) // d"
TO_TENSOR = "    dist.all_reduce(loss, group=tensor_group)\n"
TO_DATA = "    dist.all_reduce(loss, group=data_group)\n"
ROWS_TO_DATA = "    dist.all_reduce(gradient_fH, group=data_group)\n"
ROWS_TO_TENSOR = "    dist.all_reduce(gradient_fH, group=tensor_group)\n"
FEEDBACK = "loss / copies, gradient_fH / copies"
MODEL_PARALLELISM = {
    "zero_states": [
        (112e9, "Which of them does stage 2 divide"), (7e9, "which is stage 3"),
        (33.25e9, "which is stage 1"), (17.5e9, "Are the gradients there"),
        (19.25e9, "One is missing"), (18.375e9, "beside its two means"),
        (85.75e9, "are divided, too"), (26.25e9, "16 GPUs, not 8"),
        (322e9, "for all GPUs together"),
        (20.125, "10^9: the unit is bytes"),
    ],
    "gradient_traffic": [
        (14e9, "How often does each piece"), (28e9, "(N−1)/N"), (12.25e9, "do the sums come back"),
        (98e9, "passes pieces on"), (196e9, "all eight GPUs"), (49e9, "not 4"),
        (24.5, "10^9: the unit is bytes"),
    ],
    "my_busy_microbatches": [
        (nothing, "returned None, which should be a whole number"),
        (lambda p, q: q * (p - 1) / (100 - q), "whole numbers"),
        (Swap("-percent * (p - 1)", "-100 * (p - 1)"), "the whole step"),
        (lambda p, q: -(-q * p // (100 - q)), "not p"),
        (Swap("-(-percent * (p - 1) // (100 - percent))", "percent * (p - 1) // (100 - percent)"),
         "are busy for 66.67 %"),
        (Swap("max(1, ", "max(0, "), "one micro-batch at least"),
        (lambda p, q: max(1, math.ceil(q / 100 * (p - 1) / (1 - q / 100))), "rounded on the way"),
        (lambda p: 1, "raised TypeError"),
    ],
    "gpus_needed": [
        (14, "states alone"), (16, "the other 10"), (19, "whole nodes"), (18, "rounded up"),
        (5, "room for the weights"),
    ],
    "my_zero_traffic": [
        (Swap("return [2 * once, 2 * once, (m + 1) * once, 3 * m * once]",
              "return 2 * once, 2 * once, (m + 1) * once, 3 * m * once"), None),
        (nothing, "four numbers"),
        (Swap("[2 * once, 2", "[2"), "0 to 3"),
        (Swap(ONCE, "once = 2 * params"), "keeps its own share"),
        (lambda n, d, m: [2 * n * (d - 1) / d * k for k in (2, 2, 2, 3)], "for one micro-batch"),
        (Swap("[2 * once", "[once"), "to hand out"),
        (Swap("[2 * once, 2 * once", "[2 * m * once, (m + 1) * once"), "once a step"),
        (Swap("3 * m", "2 * m"), "they were freed"),
        (Swap(ONCE, "once = params * (d - 1) // d"), "has 2 bytes"),
        (Swap("(m + 1) * once", "2 * m * once"), "gathered once, after"),
        (Swap("[2 * once, 2 * once", "[2 * once, params"), "In stage 1"),
        (Swap("3 * m * once", "params"), "Stage 3 is the first"),
    ],
    "my_grid_step": [
        (nothing, "returned nothing"),
        (Swap(FEEDBACK, "loss"), "it should return the loss and the gradient"),
        (Swap(TO_TENSOR, "", TO_DATA, "", "loss / copies", "loss"), "nothing was added up"),
        (Swap(TO_DATA, "", "loss / copies", "loss"), "the loss of one copy"),
        (Swap(TO_TENSOR, ""), "lacks the other shards'"),
        (Swap("loss / copies", "loss / dist.get_world_size()"), "averaged over all ranks"),
        (Swap("loss / copies", "loss"), "losses were added up, not averaged"),
        (Swap(ROWS_TO_DATA, "", "gradient_fH / copies", "gradient_fH"), "this copy's sequences"),
        (Swap(ROWS_TO_DATA, ROWS_TO_TENSOR, "gradient_fH / copies", "gradient_fH"),
         "does not belong"),
        (Swap("gradient_fH / copies", "gradient_fH"), "gradients were added up, not averaged"),
        (Swap(ROWS_TO_DATA, ROWS_TO_DATA + ROWS_TO_TENSOR, FEEDBACK, f"{FEEDBACK} / 2"),
         "averaged over all"),
        (Swap(ROWS_TO_DATA, ROWS_TO_DATA + ROWS_TO_TENSOR, FEEDBACK, FEEDBACK[:-9]),
         "added up over all"),
    ],
    "my_layout": [
        (laid_out(dp=16, pp=1, zero=2, microbatches=32), None),
        (laid_out(dp=16, pp=1, zero=3, microbatches=32), "waits of the copies"),
        ((8, 4, 2), "should be a strategy.Layout"),
        (laid_out(dp=4, microbatches=128), "there are 64 GPUs"),
        (laid_out(microbatches=4), "a step has 512"),
        (laid_out(dp=1, tp=64, pp=1, microbatches=512), "reaches beyond a node"),
        (laid_out(zero=0), "copies can share one"),
        (laid_out(sequence_parallel=False), "sequence parallelism shares it"),
        (laid_out(micro_batch=8, microbatches=8), "fewer sequences"),
        (Layout(64, microbatches=8), "cut the model into more parts"),
        (Layout(64, zero=3, microbatches=8), "the rest are activations"),
        (Layout(64, zero=3, microbatches=8, recompute="full"), "done twice"),
        (laid_out(tp=8, pp=1), "sums inside of the layers"),
        (laid_out(zero=3, recompute="full"), "done twice"),
    ],
}  # fmt: skip

ROWS: dict[str, list[tuple[Any, str | None]]] = {
    **CHECKPOINT,
    **CLUSTER,
    **ELASTIC,
    **COLLECTIVES,
    **CONTEXT_PARALLEL,
    **DATA_PARALLEL,
    **DEEPSPEED_ENGINE,
    **EXPERTS,
    **GEMM,
    **MEMORY,
    **MESH,
    **MODEL_PARALLELISM,
    **PARITY,
    **PIPELINE,
    **SEQUENCE_PARALLEL,
    **STRATEGY,
    **TENSOR_PARALLEL,
    **TENSOR_TYPES,
    **TRAIN,
    **TRAINERS,
    **ZERO,
}
