"""Lesson `context_parallel`: its exercises accept solutions, and help with common mistakes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import each, judged

from shardlab import ranks
from shardlab.check import check


def zigzag(seq, rank, size):
    piece, late = seq // (2 * size), 2 * size - 1 - rank
    first = range(rank * piece, (rank + 1) * piece)
    return [*first, *range(late * piece, (late + 1) * piece)]


def zigzag_late_first(seq, rank, size):
    positions = zigzag(seq, rank, size)
    return positions[len(positions) // 2 :] + positions[: len(positions) // 2]


def contiguous(seq, rank, size):
    return range(rank * seq // size, (rank + 1) * seq // size)


def around(group, back=False):
    """The rank after this one, and the one before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    step = -1 if back else 1
    return (rank + step) % size, (rank - step) % size


def by_parity(tensor, group, back=False):
    (after, before), coming = around(group, back), torch.empty_like(tensor)
    if dist.get_rank(group) % 2 == 0:
        dist.send(tensor, after, group=group)
        dist.recv(coming, before, group=group)
    else:
        dist.recv(coming, before, group=group)
        dist.send(tensor, after, group=group)
    return coming


def all_send_first(tensor, group):
    (after, before), coming = around(group), torch.empty_like(tensor)
    dist.send(tensor, after, group=group)
    dist.recv(coming, before, group=group)
    return coming


def all_begin_to_send(tensor, group):
    (after, before), coming = around(group), torch.empty_like(tensor)
    works = dist.isend(tensor, after, group=group), dist.irecv(coming, before, group=group)
    for work in works:
        work.wait()
    return coming


def in_one_batch(tensor, group):
    (after, before), coming = around(group), torch.empty_like(tensor)
    ranks.exchange(tensor, after, coming, before, group).wait()
    return coming


def by_collective(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts[around(group)[1]]


def attend(q, k, v, hidden=None):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def decode(weigh="stable", gather_keys=False):
    def my_decode(q, k, v, group):
        if gather_keys:
            pair = torch.stack((k, v))
            parts = [torch.empty_like(pair) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, pair, group=group)
            return attend(q, *torch.cat(parts, 3))[0]
        out, log_sum = attend(q, k, v)
        top = log_sum.clone()
        if weigh == "stable":
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        else:
            top = torch.zeros_like(top)
        weight = (log_sum - top).exp()[..., None]
        if weigh in ("mean", "sum"):
            weight = torch.ones_like(weight)
        both = torch.cat((weight * out, weight), -1)
        dist.all_reduce(both, group=group)
        return both[..., :-1] if weigh == "sum" else both[..., :-1] / both[..., -1:]

    return my_decode


def merge(o1, l1, o2, l2):
    log_sum = torch.logaddexp(l1, l2)
    return o1 * (l1 - log_sum).exp()[..., None] + o2 * (l2 - log_sum).exp()[..., None], log_sum


def ring(turns_too_many=0, mistake=None, hand=in_one_batch):
    def my_ring(q, k, v, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        triangle = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        block = torch.stack((k, v))
        out, log_sum = attend(q, *block, None if mistake in ("no mask", "own") else triangle)
        parts = [out]
        for turn in range(1, size + turns_too_many):
            block = hand(block, group)
            source = (rank - turn) % size
            if turn < size and (source < rank or mistake in ("no mask", "triangles", "nan")):
                hidden = triangle if mistake == "triangles" else None
                if mistake == "nan" and source > rank:
                    hidden = torch.ones_like(triangle)
                parts.append(attend(q, *block, hidden)[0])
                out, log_sum = merge(out, log_sum, *attend(q, *block, hidden))
        return torch.stack(parts).mean(0) if mistake == "mean" else out

    return my_ring


def own_block(q, k, v, group):
    return attend(q, k, v, torch.ones(q.shape[2], q.shape[2]).triu(1).bool())[0]


def gathers(q, k, v, group):
    parts = [torch.empty_like(torch.stack((k, v))) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, torch.stack((k, v)), group=group)
    share, rank = q.shape[2], dist.get_rank(group)
    hidden = torch.ones(len(parts) * share, len(parts) * share).triu(1).bool()
    return attend(q, *torch.cat(parts, 3), hidden[rank * share : (rank + 1) * share])[0]


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
    ("my_pass", by_parity, None),
    ("my_pass", in_one_batch, None),
    ("my_pass", all_send_first, "Let even ranks send first"),
    ("my_pass", all_begin_to_send, "Let even ranks send first"),
    ("my_pass", lambda t, group: by_parity(t, group, back=True), "the other way"),
    ("my_pass", lambda t, group: t, "its own tensor"),
    ("my_pass", by_collective, "it calls all_gather"),
    ("my_pass", lambda t, group: None, "Rank 0 returned None"),
    ("my_decode", decode(), None),
    ("my_decode", decode("plain"), "is not finite"),
    ("my_decode", decode("mean"), "mean of the ranks' outputs"),
    ("my_decode", decode("sum"), "sum of the ranks' outputs"),
    ("my_decode", decode(gather_keys=True), "as many bytes as its keys"),
    ("my_decode", lambda q, k, v, group: attend(q, k, v)[0], "own keys alone"),
    ("my_decode", lambda *a: None, "Rank 0 returned None"),
    ("my_ring", ring(), None),
    ("my_ring", ring(hand=by_parity), None),
    ("my_ring", ring(turns_too_many=1), None),
    ("my_ring", ring(hand=all_send_first), "Let even ranks send first"),
    ("my_ring", ring(mistake="no mask"), "without a mask"),
    ("my_ring", ring(mistake="own"), "seen those behind it"),
    ("my_ring", ring(mistake="triangles"), "own block alone: earlier"),
    ("my_ring", ring(mistake="nan"), "is nan"),
    ("my_ring", ring(mistake="mean"), "the mean of the blocks' outputs"),
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
