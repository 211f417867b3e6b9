"""Wrong answers that readers give, and a few right ones that are not the lesson's, by exercise.

    exercise: [(answer, words of the verdict), …]

Words of None: it is right. `Swap("old", "new")` is the lesson's own solution with a piece of its
text replaced: what is right stands in the lesson, and the mistake stands here. The solutions
themselves, and the forms without an answer, are read from the lessons.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardlab import collectives, ranks
from shardlab.check import check


def each(answers):
    ids = [f"{answer[0]}-{i}" for i, answer in enumerate(answers)]
    return pytest.mark.parametrize("name, answer, words", answers, ids=ids)


def judged(name, answer, words):
    verdict = check(answer, name)
    assert verdict.ok == (words is None), verdict
    assert words is None or words in verdict.message


class Swap:
    """A solution in which each `old` is replaced by its `new`."""

    def __init__(self, *texts: str):
        self.pairs = list(zip(texts[::2], texts[1::2], strict=True))


def nothing(*_: Any) -> None:
    """A function that does and returns nothing."""


# ------------------------------------------------------------------------------- zero

ZERO = {
    "zero_bytes": [
        (13e9 * 16, "stage 0"),
        (13e9 * (4 + 12 / 32), "stage 1"),
        (13e9 * 16 / 32, "stage 3"),
        (13e9 * (2 + 12 / 32), "this rank's gradients"),
        (31.6875, "in bytes"),
        ("31 GB", "should be a number of bytes"),
    ],
    "my_shard_bounds": [
        (nothing, "a pair"),
        (lambda *_: 0, "a pair"),
        (Swap("-(-elements // size)", "elements // size"), "belong to nobody"),
        (lambda n, r, size: (r * -(-n // size), (r + 1) * -(-n // size)), "is padding"),
        (Swap("min(rank * shard, elements)", "rank * shard"), "behind the end"),
        (
            lambda n, r, size: (r * (n // size), n if r == size - 1 else (r + 1) * (n // size)),
            "All shards have the same size",
        ),
        (lambda elements, rank: (0, 1), "raised TypeError"),
    ],
    "my_mixed_step": [
        (nothing, "Nothing has changed"),
        (Swap(" / dist.get_world_size(group))", ")"), "summed over 2 ranks, not averaged"),
        (Swap("zero.all_gather(", "len("), "TypeError"),
        (Swap("zero.all_gather(weights, own, group).wait()", "..."), "nobody has the others'"),
        (Swap("weights[own] = master", "..."), "never get into the weights"),
        (Swap("moment.mul_(decay).add_", "moment = (decay * moment).add_"), "does not carry over"),
        (Swap("gradient.float()", "gradient"), "added up in bfloat16"),
        (
            Swap(
                "master -= lr * moment",
                "...",
                "weights[own] = master",
                "weights[own] -= (lr * moment).bfloat16()",
            ),
            "small steps round away",
        ),
        (
            Swap(
                "zero.ReduceScatter(gradient.float(), group, ordered=True).wait()",
                "gradient[own].float()",
                " / dist.get_world_size(group))",
                ")",
            ),
            "not averaged at all",
        ),
    ],
    "my_global_norm": [
        (Swap("return square.sqrt()", "return square.sqrt().item()"), None),
        (lambda gradients, group: ..., "should be a tensor"),
        (Swap("dist.all_reduce(square, group=group)", "..."), "own pieces"),
        (
            Swap(
                "dist.all_reduce", "square.sqrt_()\n    dist.all_reduce", "square.sqrt()", "square"
            ),
            "sum of the ranks' norms",
        ),
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
}

# ------------------------------------------------------------------------------- data_parallel

DATA_PARALLEL = {
    "ddp_bytes": [
        (217e6, "four bytes"),
        (434e6, "have to come back"),
        (2 * 496e6, "an eighth stays"),
        (496e6, "the two halves"),
        (7 * 496e6, "a ring does better"),
    ],
    "overlap_floor": [
        (0.19, "without any overlap"),
        (0.10, "before forward"),
        (0.09, "compute alone"),
    ],
    "my_exact_average": [
        (nothing, "nothing was averaged"),
        (Swap("        if used:", "        if True:"), "no rank used has a gradient of zeros"),
        (Swap("dist.ReduceOp.AVG", "dist.ReduceOp.SUM"), "the sum over the ranks, 2 times"),
        (
            Swap("    for", "    trained[0].data += 1\n    for"),
            "parameters themselves have changed",
        ),
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
        (
            Swap("    (loss_of(last)", "    with model.no_sync():\n        (loss_of(last)"),
            "outside no_sync()",
        ),
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
}

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


FORMULA = "size * latency * bandwidth * (1 - share) / share"
COLLECTIVES = {
    "ring_bytes": [
        (60, "average over the ranks"),
        (28, "reduce-scatter alone"),
        (14, "number of elements"),
        (120, "naive way"),
        (57, "too large"),
        ("56", "should be a number"),
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
        (Swap("if rank % 2 == 0", "if False"), "Somebody waits for what nobody sends"),
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
        (Swap("(1 - share) / share", "1 / share"), "The share is of all the time"),
        (lambda n, a, b, s: a * b / s, "and the share is of all the time"),
        (Swap("return size", "return 2 * size"), "both have bytes"),
        (Swap("return size", "return 2 * (size - 1)"), "Count 2 (N - 1)/N"),
        (Swap("/ share", "/ share / 4"), "bytes are asked"),
        (lambda n, a, b, s: collectives.CostModel(a, b).crossover(n), "begins to beat the tree"),
        (lambda n, a, b, s: "25 MB", "should be a number"),
        (lambda n, a: 0, "raised TypeError"),
        (lambda n, a, b, s: 25e6 + n, "It is too large"),
    ],
}

# ------------------------------------------------------------------------------- gemm

C = 4 * 4096 * 11008
REDUCE = "dist.all_reduce(c_MN, group=group)"
GEMM = {
    "gemm_bytes": [
        (0.75 * C, "a reduce-scatter"),
        (3 * C, "naive way"),
        (C, "the size of C"),
        (2 * C, "very many ranks"),
        (1.5 * 4096 * 11008, "elements"),
        (1.5 * 4 * 4096 * 2048, "wrong matrix"),
        (1.5 * C / 1e6, "in bytes"),
    ],
    "gemm_pays": [
        (4000, "a multiply-add as one"),
        (1750, "Both sides lose an eighth"),
        (1000, "into the numerator"),
        (250, "at the same time"),
    ],
    "my_backward_of_columns": [
        (Swap("dist.all_reduce(grad_MK, group=group)", "..."), "has its own part"),
        (Swap("return grad_MK,", "return grad_MK / group.size(),"), "the mean of the ranks' parts"),
        (
            Swap(
                "    return grad_MK, a_MK.T @ grad_Mn",
                "    b = a_MK.T @ grad_Mn\n    dist.all_reduce(b)\n    return grad_MK, b",
            ),
            "These are sums over the ranks",
        ),
        (Swap("    return", "    dist.barrier(group)\n    return"), "1 will do"),
        (lambda a, b, grad, group: a, "it should return A's gradient"),
        (lambda a_MK: a_MK, "TypeError"),
    ],
    "my_inner": [
        (
            Swap(REDUCE, "c_MN += bias_N\n    " + REDUCE, " + bias_N", ""),
            "The bias is in it 2 times",
        ),
        (Swap("c_MN + bias_N", "c_MN"), "The bias is missing"),
        (Swap(REDUCE, "..."), "and the bias: nobody has added them up"),
        (lambda a, b, bias, group: a @ b, "own products: nobody has added them up"),
        (Swap("return c_MN", "return c_MN / group.size()"), "the mean of the ranks' products"),
        (nothing, "returned None"),
    ],
    "my_two_products": [
        (Swap("dist.all_reduce(z_MN, group=group)", "..."), "cut in its inner dimension"),
        (Swap("F.gelu(x_MK @ v_Kf)", "x_MK @ v_Kf"), "GELU is missing"),
        (
            Swap("F.gelu(x_MK @ v_Kf)", "x_MK @ v_Kf", "return z_MN", "return F.gelu(z_MN)"),
            "between the two products",
        ),
        (Swap("return z_MN", "return z_MN / group.size()"), "mean of the ranks' parts"),
        (Swap("    return", "    dist.barrier(group)\n    return"), "1 will do"),
    ],
    "my_ring_product": [
        (Swap("range(size)", "range(1)"), "own piece of B"),
        (Swap("(rank - step)", "(rank + step)"), "those of rank (r + i)"),
        (Swap("    return", "    dist.barrier(group)\n    return"), "ranks.exchange"),
        (
            Swap("    return", "    ranks.exchange(b_kN, after, piece, before, group)\n    return"),
            "are enough",
        ),
        (
            Swap(
                "travelling = ranks.exchange(piece, after, following, before, group)",
                "sent = ranks.isend(piece, after, group)\n"
                "            ranks.irecv(following, before, group).wait(), sent.wait()",
                "travelling.wait()",
                "...",
            ),
            "With nccl it hangs",
        ),
        (lambda a, b, group: ranks.irecv(b, 1 - group.rank(), group).wait(), "what nobody sends"),
    ],
    "my_way": [
        (Swap("M * k + k * N + M * N", "M * k + k * N + m * N"), "as large as all of C"),
        (lambda *_: "rows", "The fullest rank has"),
        (lambda *_: 1, "one of 'rows', 'columns' and 'inner'"),
        (lambda M, K: "rows", "raised TypeError"),
    ],
}

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
    share, rank, size = q.shape[2], dist.get_rank(group), dist.get_world_size(group)
    hidden = triangle(q, size)[rank * share : (rank + 1) * share]
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
        (by_parity, None),
        (all_send, "one has to send first"),
        (all_begin_to_send, "Let even ranks send first"),
        (Swap("+ 1) % N", "+ 1 - N) % N", "- 1) % N", "- 1 + N) % N"), None),
        (
            Swap("(rank + 1)", "(rank+1)", "(rank - 1)", "(rank + 1)", "(rank+1)", "(rank - 1)"),
            "the other way",
        ),
        (lambda t, group: t, "its own tensor"),
        (lambda t, group: gathered(t[None], group)[dist.get_rank(group) - 1], "calls all_gather"),
        (nothing, "Rank 0 returned None"),
    ],
    "my_decode": [
        (
            Swap("dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)", "largest *= 0"),
            "finite",
        ),
        (
            Swap("(log_sum - largest).exp()", "torch.ones_like(log_sum)"),
            "mean of the ranks' outputs",
        ),
        (
            Swap("(log_sum - largest).exp()", "torch.ones_like(log_sum)", " / both[..., -1:]", ""),
            "sum of the ranks' outputs",
        ),
        (
            lambda q, k, v, group: attend(q, gathered(k, group, 2), gathered(v, group, 2)),
            "as many bytes as its keys",
        ),
        (lambda q, k, v, group: attend(q, k, v), "own keys alone"),
        (nothing, "Rank 0 returned None"),
    ],
    "my_ring": [
        (Swap("if turn < N - 1:\n            passing =", "if True:\n            passing ="), None),
        (Swap(PASSING, ONE_BY_ONE, "passing.wait()", "..."), "Let even ranks send first"),
        (Swap("if source <= rank", "if True", "if source == rank", "if False"), "without a mask"),
        (Swap("if source == rank", "if False"), "seen those behind it"),
        (
            Swap("if source <= rank", "if True", "if source == rank", "if True"),
            "own block alone: earlier",
        ),
        (
            Swap(
                "if source <= rank",
                "if True",
                "if source == rank:",
                "if source >= rank:\n                hidden = hidden | (source > rank)",
            ),
            "is nan",
        ),
        (MEAN, "the mean of the blocks' outputs"),
        (lambda q, k, v, group: attend(q, k, v, triangle(q)), "own keys alone"),
        (gathers, "calls all_gather"),
        (nothing, "Rank 0 returned None"),
    ],
    "my_context": [
        (Swap("return 1,", "return [1]; 1,"), "should be a pair"),
        (Swap("states + kept", "states / N + kept"), "divides no states"),
        (Swap("if divides and", "if"), "divide both numbers of heads"),
        (
            Swap("(heads + kv_heads) / N < kv_heads", "2 * heads < N * heads"),
            "fewer heads than queries",
        ),
        (Swap("return None", 'return 64, "ring"'), "do 64 ranks suffice"),
        (Swap('"none"', '"ring"'), "has nobody to talk to"),
        (Swap('"all-to-all"', '"none"'), "The ranks are right"),
        (lambda seq: None, "raised TypeError"),
    ],
}

# ------------------------------------------------------------------------------- experts

WIRE = 2 * 4096 * 8 * 7168 * 2
EXPERTS = {
    "experts_tokens": [
        (300 * 256, "eight experts"),
        (2400, "How many experts share them?"),
        (150, "all of them together"),
        ("many", "should be a number of tokens"),
    ],
    "experts_wire": [
        (WIRE, "does not leave it"),
        (WIRE * 63 / 128, "has to come back"),
        (WIRE / 2, "own experts' rows included"),
        (WIRE * 63 / 32, "asked is forward"),
        (WIRE / 8 * 63 / 64, "as eight rows"),
    ],
    "my_admit": [
        (
            Swap(
                "for c in range(chosen_TC.shape[1]):\n        for t in range(chosen_TC.shape[0]):",
                "for t in range(chosen_TC.shape[0]):\n        for c in range(chosen_TC.shape[1]):",
            ),
            "token by token",
        ),
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
}

# ------------------------------------------------------------------------------- sequence_parallel

SBH = 2048 * 12_288
AGAIN = "Column.gather(x_BsH, ctx.group)"
SEQUENCE_PARALLEL = {
    "sequence_bytes": [
        (SBH * 13, "tensor parallelism alone"),
        (SBH * 34, "whole layer"),
        (SBH * (34 + 80) / 8, "keeps attention's scores"),
        (SBH * 3, "where are the norms'"),
        (SBH * 34 / 8e6, "In MB it is right"),
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
        (
            Swap(
                f"x_BSH = {AGAIN}\n        dw_HF = x_BSH",
                "dy_BSF = dy_BSF.chunk(t, 1)[rank]\n        dw_HF = x_BsH",
            ),
            "this rank's tokens alone",
        ),
        (Swap("torch.cat(parts, dim=1)", "torch.cat(parts).view(2, -1, 4)"), "whole batches"),
        (
            Swap(
                "return Column.gather(x_BsH, group) @",
                "ctx.x = Column.gather(x_BsH, group)\n        return ctx.x @",
                AGAIN,
                "ctx.x",
            ),
            "kept until backward",
        ),
        (
            Swap(
                "ctx.save_for_backward(x_BsH, w_HF)",
                "x_BsH = torch.cat([x_BsH, Column.gather(x_BsH, group)], 1)\n"
                "        ctx.save_for_backward(x_BsH, w_HF)\n        x_BsH = x_BsH[:, :3]",
                AGAIN,
                "x_BsH[:, 3:]",
            ),
            "kept until backward",
        ),
        (Swap("Column.apply(x_BsH", "Column.apply(x_BsH.detach()"), "know nothing of autograd"),
        (lambda x, w, group: x @ w, "has the shape"),
        (nothing, "Rank 0 returned None"),
    ],
}

ROWS: dict[str, dict[str, list[tuple[Any, str | None]]]] = {
    "zero": ZERO,
    "data_parallel": DATA_PARALLEL,
    "collectives": COLLECTIVES,
    "gemm": GEMM,
    "context_parallel": CONTEXT_PARALLEL,
    "experts": EXPERTS,
    "sequence_parallel": SEQUENCE_PARALLEL,
}
