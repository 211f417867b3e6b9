"""Exercises of the lesson `context_parallel`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardcourse.exercises.forms import (
    Part,
    Trial,
    bytes_at_most,
    calls_at_most,
    cases,
    nobody_waits,
    on_ranks,
)


def _zigzag(seq: int, rank: int, size: int) -> list[int]:
    pieces = torch.arange(seq).chunk(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank])).tolist()


def _positions(got: Any) -> list[int]:
    return [int(position) for position in got]


cases(
    "my_zigzag",
    [
        (seq, rank, size)
        for seq, size in ((8, 2), (16, 4), (12, 2), (6, 1), (48, 8))
        for rank in range(size)
    ],
    _zigzag,
    equal=lambda got, want: _positions(got) == _positions(want),
    says="Right for 1, 2, 4 and 8 ranks: each has an early piece and a late one.",
    mistakes={
        "That is the contiguous cut: the last rank does most of the work.": (
            lambda seq, rank, size: range(rank * seq // size, (rank + 1) * seq // size)
        ),
        "That is the striped cut: balanced as well, but in more pieces.": (
            lambda seq, rank, size: range(rank, seq, size)
        ),
    },
)


@on_ranks(
    "my_pass",
    (2, 3, 4),
    rules=[
        calls_at_most(0, "use dist.send and dist.recv, or dist.batch_isend_irecv."),
        nobody_waits,
    ],
    says="Right on 2, 3 and 4 ranks; replayed by nccl's rules, nobody waits for ever.",
)
def _(size: int) -> Trial:
    every = [torch.arange(3.0) + 10 * rank for rank in range(size)]
    before = [every[rank - 1] for rank in range(size)]
    mistakes = {
        "It went round the other way: rank r sends to rank r + 1.": [*every[1:], every[0]],
    }
    return Trial([Part("the tensor", before, mistakes)], [(one,) for one in every])


def _heads(rank: int, tokens: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's queries, keys and values: [2, 2, tokens, 4] each."""
    generator = torch.Generator().manual_seed(7 + rank)
    q, k, v = torch.randn(3, 2, 2, tokens, 4, generator=generator, dtype=torch.float64)
    return q, 2 * k, v


def _attend(q_BAsD: Tensor, k_BASD: Tensor, v_BASD: Tensor, hidden: Tensor | None = None) -> Tensor:
    scores = q_BAsD @ k_BASD.transpose(-1, -2) / q_BAsD.shape[-1] ** 0.5  # [B, A, s, S]
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v_BASD


def _cache(rank: int, large: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return one query, the same on all ranks, and this rank's keys and values of 64 tokens."""
    q = _heads(0)[0][:, :, :1]
    _, k, v = _heads(rank, 64)
    if large:  # scores of 1000 and more, with a different maximum on each rank
        k = k + (2000 + 100 * rank) * q / q.square().sum(-1, keepdim=True)
    return q, k, v


@on_ranks(
    "my_decode",
    ((2, False), (4, False), (4, True)),
    rules=[
        bytes_at_most(
            lambda n: 2 * 2 * 64 * 4 * 8 - 1,  # less than one rank's keys in float64
            "send what came of the keys, an output and a logarithm for each head.",
        )
    ],
    says="Right on 2 and 4 ranks, and no rank sends its keys.",
)
def _(size: int, large: bool) -> Trial:
    given = [_cache(rank, large) for rank in range(size)]
    q, k, v = zip(*given, strict=True)
    own = [_attend(q[0], k[r], v[r]) for r in range(size)]
    mistakes = {
        "Each rank has attended to its own keys alone.": own,
        "It is the mean of the ranks' outputs: a rank counts by the sum of its exponentials.": (
            sum(own) / size
        ),
    }
    right = _attend(q[0], torch.cat(k, 2), torch.cat(v, 2))
    # float64: logarithms around 1000 keep 12 digits after the decimal point
    return Trial([Part("the output", right, mistakes, 1e-9)], given)


@on_ranks(
    "my_ring",
    (2, 4),
    rules=[
        calls_at_most(0, "pass blocks on to the next rank, so that nobody ever holds all of them."),
        nobody_waits,
    ],
    says="Right on 2 and 4 ranks, and nobody ever holds all keys.",
)
def _(size: int) -> Trial:
    given = [_heads(rank) for rank in range(size)]
    q, k, v = zip(*given, strict=True)
    keys, values, local_seq = torch.cat(k, 2), torch.cat(v, 2), q[0].shape[2]
    hidden = torch.ones(size * local_seq, size * local_seq).triu(1).bool().split(local_seq)
    triangle = torch.ones(local_seq, local_seq).triu(1).bool()
    each = [
        [_attend(q[r], k[i], v[i], triangle if i == r else None) for i in range(r + 1)]
        for r in range(size)
    ]
    mistakes = {
        "It is the ring without a mask: a token sees itself and those before it.": [
            _attend(mine, keys, values) for mine in q
        ],
        "Each rank has attended to its own keys alone.": [parts[-1] for parts in each],
        "It is the mean of the blocks' outputs; a block counts by the sum of its exponentials.": [
            torch.stack(parts).mean(0) for parts in each
        ],
    }
    right = [_attend(q[r], keys, values, hidden[r]) for r in range(size)]
    # float64, values of order 1, summed in another order
    return Trial([Part("the output", right, mistakes, 1e-11)], given)


def _plan(
    seq: int,
    kept: float,
    states: float,
    memory: float,
    heads: int,
    kv_heads: int,
    shared: bool = False,
    indivisible: bool = False,
) -> tuple[int, str] | None:
    """Return (ranks, kind); `shared` or `indivisible` gives a mistake that has its own sentence."""
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        if states / (ranks if shared else 1) + kept * seq / ranks > memory:
            continue
        divides = indivisible or (heads % ranks == 0 and kv_heads % ranks == 0)
        fewer = heads + kv_heads < ranks * kv_heads
        return ranks, "none" if ranks == 1 else "all-to-all" if fewer and divides else "ring"
    return None


# Tokens, bytes of states, query heads, key/value heads.
_JOBS = ((8192, 20e9, 32, 32), (32_768, 20e9, 32, 32), (65_536, 20e9, 32, 32))
_JOBS += ((65_536, 20e9, 32, 8), (131_072, 20e9, 32, 8), (262_144, 20e9, 32, 8))
_JOBS += ((1_048_576, 20e9, 32, 32), (131_072, 20e9, 12, 12), (8_388_608, 20e9, 32, 32))
_JOBS += ((8192, 90e9, 32, 32),)
cases(
    "my_context",
    # 2 MB of activations a token, and 80 GB of memory
    [(seq, 2e6, states, 80e9, heads, kv_heads) for seq, states, heads, kv_heads in _JOBS],
    _plan,
    says="Right for 10 jobs, two of which fit on no number of ranks.",
    mistakes={
        "Cutting the sequence divides no states: each rank holds the whole model.": partial(
            _plan, shared=True
        ),
        "For the all-to-all the ranks must divide both numbers of heads.": partial(
            _plan, indivisible=True
        ),
    },
)
