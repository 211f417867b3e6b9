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

ROWS: dict[str, dict[str, list[tuple[Any, str | None]]]] = {
    "zero": ZERO,
    "data_parallel": DATA_PARALLEL,
    "collectives": COLLECTIVES,
}
