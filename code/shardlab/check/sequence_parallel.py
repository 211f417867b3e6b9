"""The checks of lesson `sequence_parallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import count
from shardlab.check import Wrong, exercise, number, run_answer, same


@exercise("sequence_bytes")
def _(answer: Any) -> str:
    sbh, t = 2048 * 12_288, 8
    number(
        answer,
        sbh * 34 / t,
        "bytes",
        rel=0.001,
        hints={
            sbh * (10 + 24 / t): "That is tensor parallelism alone: the 10 of norms, dropout and "
            "inputs are to be divided, too.",
            sbh * 34: "That is the whole layer: each rank keeps an eighth of everything.",
            sbh * (34 + 80) / t: "That keeps attention's scores: a fused kernel does not.",
            sbh * 24 / t: "That is what stands inside of the cut matrices; where are the norms' "
            "inputs?",
            sbh * 34 / t / 1e6: "In MB it is right; the answer is asked for in bytes.",
        },
    )
    return "Right: 34/8 bytes for each of the 2048 × 12,288 elements, 107 MB instead of 856."


def _zigzag(seq: int, rank: int, size: int) -> list[int]:
    pieces = torch.arange(seq).chunk(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank])).tolist()


@exercise("my_zigzag")
def _(answer: Callable[[int, int, int], Any]) -> str:
    for seq, size in ((8, 2), (16, 4), (12, 2), (6, 1), (48, 8)):
        share, piece = seq // size, seq // (2 * size)
        for rank in range(size):
            asked = f"my_zigzag({seq}, {rank}, {size})"
            try:
                got = answer(seq, rank, size)
                given = None if got is None else [int(position) for position in got]
            except Exception as error:
                raise Wrong(f"{asked} raised {type(error).__name__}: {error}") from None
            want = _zigzag(seq, rank, size)
            if given == want:
                continue
            if given is None:
                raise Wrong(f"{asked} returned None; it should be a list of positions.")
            hint = f"Of {2 * size} pieces rank {rank} has numbers {rank} and {2 * size - 1 - rank}."
            if given == list(range(rank * share, (rank + 1) * share)):
                hint = "That is the contiguous cut: the last rank does most of the work."
            elif given == list(range(rank, seq, size)):
                hint = "That is the striped cut: balanced as well, but in more pieces."
            elif sorted(given) == want:
                hint = "The tokens are right, their order is not: the early piece comes first."
            elif given == want[:piece]:
                hint = "The second piece is missing: the same one, counted from the end."
            elif len(given) != share:
                hint = f"Each rank has {share} of the {seq} positions."
            raise Wrong(f"{asked} returned {given}. {hint}")
    return "Right for 1, 2, 4 and 8 ranks: each has an early piece and a late one."


def _part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over these keys alone, times their values, and the logarithm of its denominator."""
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@exercise("my_merge")
def _(answer: Callable[..., Any]) -> str:
    generator = torch.Generator().manual_seed(0)
    values, scores = (
        torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)
        for shape in ((10, 8), (5, 10))
    )
    for shift in (0, 1000, -1000):
        o1, l1 = _part(shift + scores[..., :4], values[..., :4, :])
        o2, l2 = _part(shift + scores[..., 4:], values[..., 4:, :])
        right_o, right_l = _part(shift + scores, values)
        where = f"scores around {shift}"
        o, log_sum = _merged(answer, where, o1, l1, o2, l2)
        if not (o.isfinite().all() and log_sum.isfinite().all()):
            raise Wrong(
                f"With {where} the result is not finite: exp(1000) is too large for any number, "
                "and exp(-1000) is 0. Take exponentials of differences only."
            )
        # float64, values of a few units; logarithms around 1000 have 12 digits behind the point.
        hints = {
            "It is the mean of both: larger scores count for more.": [(o1 + o2) / 2],
            "It is the sum of both: their weights have to add up to 1.": [o1 + o2],
        }
        same([o], [right_o], f"o ({where})", 1e-9, hints)
        hints = {
            "It is the larger of both.": [torch.maximum(l1, l2)],
            "It is the sum of both: what adds up are the sums, not their logarithms.": [l1 + l2],
        }
        same([log_sum], [right_l], f"l ({where})", 1e-9, hints)
    nothing = torch.zeros_like(o1), torch.full_like(l1, -torch.inf)
    for parts in ((*nothing, o2, l2), (o2, l2, *nothing)):
        o, log_sum = _merged(answer, "an empty block", *parts)
        if not (torch.allclose(o, o2) and torch.allclose(log_sum, l2)):
            raise Wrong(
                "A block in which a query sees nothing has l = -inf and o = 0; merged with it, the "
                "other block should come out unchanged."
            )
    return "Right, with large scores, and with a block that is masked away altogether."


def _merged(answer: Callable[..., Any], where: str, *parts: Tensor) -> tuple[Tensor, Tensor]:
    try:
        got = answer(*(part.clone() for part in parts))
    except Exception as error:
        raise Wrong(f"With {where} my_merge raised {type(error).__name__}: {error}") from None
    pair = isinstance(got, tuple) and len(got) == 2
    if not (pair and all(isinstance(tensor, Tensor) for tensor in got)):
        raise Wrong("my_merge should return a pair of tensors, (o, l).")
    return got


_B, _SHARE, _H = 2, 3, 4


def _tokens(rank: int) -> tuple[Tensor, Tensor]:
    """This rank's share of the stream, and what it does with the gathered one: a factor."""
    generator = torch.Generator().manual_seed(rank)
    x_BsH = torch.randn(_B, _SHARE, _H, generator=generator, dtype=torch.float64)
    factor = torch.randn(_B, 4 * _SHARE, _H, generator=generator, dtype=torch.float64)
    return x_BsH, factor


def _enter(answer: Callable[..., Any]) -> tuple[Any, Any]:
    size = dist.get_world_size()
    x_BsH, factor = _tokens(dist.get_rank())
    x_BsH.requires_grad_()
    out = answer(x_BsH, dist.group.WORLD)
    whole = torch.cat([_tokens(rank)[0] for rank in range(size)], 1)
    if isinstance(out, Tensor) and out.equal(whole) and out.requires_grad:
        (out * factor[:, : size * _SHARE]).sum().backward()
    return out, x_BsH.grad


@exercise("my_enter")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        results = run_answer(_enter, size, answer, timeout=10)
        shares = [_tokens(rank)[0] for rank in range(size)]
        mixed = torch.cat(shares).view(_B, size * _SHARE, _H)
        hint = "An all-gather puts one rank's tensor behind the other's, whole batches: bring the "
        hint += "tokens of one sequence together before reshaping (torch.cat(…, dim=1))."
        whole = torch.cat(shares, 1)
        # Gathering adds nothing up, so nothing is rounded.
        same([out for out, _ in results], [whole] * size, "the output", 0.0, {hint: [mixed] * size})
        if any(gradient is None for _, gradient in results):
            raise Wrong(
                "The output is right, and x_BsH gets no gradient: collectives know nothing of "
                "autograd. Write a torch.autograd.Function with a backward of its own."
            )
        factors = [_tokens(rank)[1][:, : size * _SHARE] for rank in range(size)]
        total = torch.stack(factors).sum(0)
        same(
            [gradient for _, gradient in results],
            list(total.chunk(size, 1)),
            "the gradient",
            1e-12,  # float64: four numbers of order 1, added in any order
            {
                "It is this rank's gradient alone: every rank has used these tokens, and their "
                "gradients add up.": [factor.chunk(size, 1)[r] for r, factor in enumerate(factors)],
            },
        )
    return "Right on 2 and 4 ranks: an all-gather forward, a reduce-scatter backward."


def _heads(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's queries, keys and values: [2, 2, 3, 4]."""
    generator = torch.Generator().manual_seed(7 + rank)
    q, k, v = torch.randn(3, 2, 2, 3, 4, generator=generator, dtype=torch.float64)
    return q, 2 * k, v


def _ring(answer: Callable[..., Any]) -> tuple[Any, dict[str, tuple[int, int]], int]:
    with count.sent() as sent:
        out = answer(*_heads(dist.get_rank()), dist.group.WORLD)
    return out, sent.collectives, sent.bytes


@exercise("my_ring")
def _(answer: Callable[..., Any]) -> str:
    blocks = 0.0
    for size in (2, 4):
        results = run_answer(_ring, size, answer, timeout=10)
        q, k, v = zip(*(_heads(rank) for rank in range(size)), strict=True)
        keys, values = torch.cat(k, 2), torch.cat(v, 2)
        own = [_attend(q[r], k[r], v[r]) for r in range(size)]
        each = [[_attend(q[r], k[i], v[i]) for i in range(size)] for r in range(size)]
        same(
            [out for out, _, _ in results],
            [_attend(q[r], keys, values) for r in range(size)],
            "the output",
            1e-11,  # float64, values of order 1, sums in another order
            {
                "Each rank has attended to its own keys alone.": own,
                "It is the mean of the blocks' outputs; a block counts by the sum of its "
                "exponentials.": [torch.stack(parts).mean(0) for parts in each],
                "It is the sum of the blocks' outputs: each was divided by its own sum of "
                "exponentials, not by that of all.": [torch.stack(parts).sum(0) for parts in each],
            },
        )
        for _, collectives, sent in results:
            if collectives:
                raise Wrong(
                    f"The output is right, but it calls {next(iter(collectives))}: pass blocks on "
                    "with ranks.exchange, so that nobody ever holds all of them."
                )
            blocks = max(blocks, sent / (2 * k[0].numel() * 8))  # of keys and values, float64
    if blocks > 3:
        return "Right. On 4 ranks it sends 4 blocks or more; 3 are enough: keep the last one."
    return "Right on 2 and 4 ranks: each of 4 sends 3 blocks."


def _attend(q_BAsD: Tensor, k_BASD: Tensor, v_BASD: Tensor) -> Tensor:
    scores = q_BAsD @ k_BASD.transpose(-1, -2) / q_BAsD.shape[-1] ** 0.5  # [B, A, s, S]
    return scores.softmax(-1) @ v_BASD


# Tokens, bytes of states, heads, heads of keys and values; 2 MB a token, and 80 GB of memory.
_JOBS = (
    (8192, 20e9, 32, 32),
    (32_768, 20e9, 32, 32),
    (65_536, 20e9, 32, 32),
    (65_536, 20e9, 32, 8),
    (131_072, 20e9, 32, 8),
    (262_144, 20e9, 32, 8),
    (1_048_576, 20e9, 32, 32),
    (131_072, 20e9, 12, 12),
    (8_388_608, 20e9, 32, 32),
    (8192, 90e9, 32, 32),
)


def _plan(
    seq: int,
    states: float,
    heads: int,
    kv_heads: int,
    shared: bool = False,
    grouped: bool = True,
    divisible: bool = True,
) -> tuple[int, str] | None:
    """The answer; the last three are the mistakes that have a sentence."""
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        if states / (ranks if shared else 1) + 2e6 * seq / ranks > 80e9:
            continue
        narrow = kv_heads if grouped else heads
        whole = not divisible or (heads % ranks == 0 and kv_heads % ranks == 0)
        fewer = heads + narrow < ranks * narrow
        return ranks, "none" if ranks == 1 else "all-to-all" if fewer and whole else "ring"
    return None


@exercise("my_context")
def _(answer: Callable[..., Any]) -> str:
    got = []
    for seq, states, *heads in _JOBS:
        try:
            got.append(answer(seq, 2e6, states, 80e9, *heads))
        except Exception as error:
            raise Wrong(f"my_context raised {type(error).__name__}: {error}") from None
    want = [_plan(*job) for job in _JOBS]
    if got == want:
        return f"Right for {len(want)} jobs, two of which fit on no number of ranks."
    first = next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
    seq, states, a, K = _JOBS[first]
    words = f"{seq:,} tokens, {states / 1e9:.0f} GB of states, {a} heads, {K} of keys and values: "
    words += f"it returned {got[first]!r}."
    if got == [_plan(*job, shared=True) for job in _JOBS]:
        words += " Cutting the sequence divides no states: each rank holds the whole model."
    elif got == [_plan(*job, divisible=False) for job in _JOBS]:
        words += " For the all-to-all the ranks must divide both numbers of heads."
    elif got == [_plan(*job, grouped=False) for job in _JOBS]:
        words += " The ring moves keys and values alone, which have fewer heads than queries here."
    elif want[first] is None:
        words += " Do the states fit, and do 64 ranks suffice?"
    elif not isinstance(got[first], tuple | None):
        words += " It should be a pair, such as (4, 'ring'), or None."
    elif want[first] == (1, "none"):
        words += " One rank holds everything, and has nobody to talk to: (1, 'none')."
    elif got[first] is not None and got[first][0] == want[first][0]:
        words += " The ranks are right. Of each of its tokens a rank sends 2K (N-1) heads in the "
        words += "ring, (2a + 2K) (N-1)/N in the all-to-all."
    raise Wrong(words)
