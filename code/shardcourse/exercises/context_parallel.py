"""Exercises of the lesson `context_parallel`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardcourse.exercises.forms import (
    Output,
    Trial,
    add_cases,
    add_trials,
    check_nccl_deadlock,
    check_received_freed,
    limit_bytes,
    limit_calls,
)


def _compute_zigzag(seq: int, rank: int, size: int) -> list[int]:
    pieces = torch.arange(seq).chunk(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank])).tolist()


def _to_ints(got: Any) -> list[int]:
    return [int(position) for position in got]


add_cases(
    "my_zigzag",
    [
        (seq, rank, size)
        for seq, size in ((8, 2), (16, 4), (12, 2), (6, 1), (48, 8))
        for rank in range(size)
    ],
    _compute_zigzag,
    equal=lambda got, want: _to_ints(got) == _to_ints(want),
    success="Right for 1, 2, 4 and 8 ranks: each has an early piece and a late one.",
    mistakes={
        "That is the contiguous cut: the last rank does most of the work.": (
            lambda seq, rank, size: range(rank * seq // size, (rank + 1) * seq // size)
        ),
        "That is the striped cut: balanced as well, but in more pieces.": (
            lambda seq, rank, size: range(rank, seq, size)
        ),
    },
)


@add_trials(
    "my_pass",
    (2, 3, 4),
    rules=[
        limit_calls(0, "use dist.send and dist.recv, or dist.batch_isend_irecv."),
        check_nccl_deadlock,
    ],
    success="Right on 2, 3 and 4 ranks; no deadlock, not even by nccl's rules.",
)
def _(size: int) -> Trial:
    every = [torch.arange(3.0) + 10 * rank for rank in range(size)]
    before = [every[rank - 1] for rank in range(size)]
    mistakes = {"The ring turns the other way: rank r sends to rank r + 1.": [*every[1:], every[0]]}
    return Trial([Output("the tensor", before, mistakes)], [(one,) for one in every])


def _make_qkv(rank: int, tokens: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's queries, keys and values: [2, 2, tokens, 4] each."""
    generator = torch.Generator().manual_seed(7 + rank)
    q, k, v = torch.randn(3, 2, 2, tokens, 4, generator=generator, dtype=torch.float64)
    return q, 2 * k, v


def _run_attn(q_BAsD: Tensor, k_BASD: Tensor, v_BASD: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q_BAsD @ k_BASD.transpose(-1, -2) / q_BAsD.shape[-1] ** 0.5  # [B, A, s, S]
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    return scores.softmax(-1) @ v_BASD


def _make_kv_cache(rank: int, large: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return one query, the same on all ranks, and this rank's keys and values of 64 tokens."""
    q = _make_qkv(0)[0][:, :, :1]
    _, k, v = _make_qkv(rank, 64)
    if large:  # scores of 1000 and more, with a different maximum on each rank
        k = k + (2000 + 100 * rank) * q / q.square().sum(-1, keepdim=True)
    return q, k, v


@add_trials(
    "my_decode",
    ((2, False), (4, False), (4, True)),
    rules=[
        limit_bytes(
            lambda n: 2 * 2 * 64 * 4 * 8 - 1,  # less than one rank's keys in float64
            "send the results of the keys, an output and a logarithm for each head.",
        )
    ],
    success="Right on 2 and 4 ranks, and no rank sends its keys.",
)
def _(size: int, large: bool) -> Trial:
    given = [_make_kv_cache(rank, large) for rank in range(size)]
    q, k, v = zip(*given, strict=True)
    own = [_run_attn(q[0], k[r], v[r]) for r in range(size)]
    mistakes = {
        "Each rank has attended to its own keys alone.": own,
        "It is the mean of the ranks' outputs: a rank counts by the sum of its exponentials.": (
            sum(own) / size
        ),
    }
    right = _run_attn(q[0], torch.cat(k, 2), torch.cat(v, 2))
    # float64: logarithms around 1000 keep 12 digits after the decimal point
    return Trial([Output("the output", right, mistakes, 1e-9)], given)


@add_trials(
    "my_ring",
    (2, 5),
    rules=[
        limit_calls(0, "pass blocks on to the next rank, so that no rank ever holds all of them."),
        check_nccl_deadlock,
        check_received_freed,
    ],
    success="Right on 2 and 5 ranks, and no rank ever holds all keys.",
)
def _(size: int) -> Trial:
    given = [_make_qkv(rank) for rank in range(size)]
    q, k, v = zip(*given, strict=True)
    keys, values, local_seq = torch.cat(k, 2), torch.cat(v, 2), q[0].shape[2]
    hidden = torch.ones(size * local_seq, size * local_seq).triu(1).bool().split(local_seq)
    triangle = torch.ones(local_seq, local_seq).triu(1).bool()
    each = [
        [_run_attn(q[r], k[i], v[i], triangle if i == r else None) for i in range(r + 1)]
        for r in range(size)
    ]
    mistakes = {
        "It is the ring without a mask: a token sees itself and earlier tokens alone.": [
            _run_attn(mine, keys, values) for mine in q
        ],
        "Each rank has attended to its own keys alone.": [parts[-1] for parts in each],
        "It is the mean of the blocks' outputs; a block counts by the sum of its exponentials.": [
            torch.stack(parts).mean(0) for parts in each
        ],
    }
    right = [_run_attn(q[r], keys, values, hidden[r]) for r in range(size)]
    # float64, values of order 1, summed in another order
    return Trial([Output("the output", right, mistakes, 1e-11)], given)


def _choose_context(
    seq: int,
    token_bytes: float,
    states: float,
    memory: float,
    heads: int,
    kv_heads: int,
    shards_states: bool = False,
    allows_uneven_heads: bool = False,
) -> tuple[int, str] | None:
    """Return (ranks, kind), also for the mistakes that the two flags make."""
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        if states / (ranks if shards_states else 1) + token_bytes * seq / ranks > memory:
            continue
        divides = allows_uneven_heads or (heads % ranks == 0 and kv_heads % ranks == 0)
        fewer = heads + kv_heads < ranks * kv_heads
        return ranks, "none" if ranks == 1 else "all-to-all" if fewer and divides else "ring"
    return None


# Tokens, bytes of states, query heads, key/value heads. The first job fits to the byte.
_JOBS = ((30_000, 20e9, 32, 32), (32_768, 20e9, 32, 32), (65_536, 20e9, 32, 32))
_JOBS += ((65_536, 20e9, 32, 8), (131_072, 20e9, 32, 8), (262_144, 20e9, 32, 8))
_JOBS += ((1_048_576, 20e9, 32, 32), (131_072, 20e9, 12, 12), (8_388_608, 20e9, 32, 32))
_JOBS += ((8192, 90e9, 32, 32),)
add_cases(
    "my_context",
    # 2 MB of activations a token, and 80 GB of memory
    [(seq, 2e6, states, 80e9, heads, kv_heads) for seq, states, heads, kv_heads in _JOBS],
    _choose_context,
    success="Right for 10 jobs, two of which fit on no number of ranks.",
    mistakes={
        "Cutting the sequence divides no states: each rank holds the whole model.": partial(
            _choose_context, shards_states=True
        ),
        "For the all-to-all the ranks must divide both numbers of heads.": partial(
            _choose_context, allows_uneven_heads=True
        ),
    },
)
