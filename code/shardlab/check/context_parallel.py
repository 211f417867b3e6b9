"""The checks of lesson `context_parallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab import count
from shardlab.check import Wrong, exercise, run_answer, same


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


# Messages that a rank begins at once: "send" or "recv", and its peer.
_Posted = list[tuple[str, int]]


class _Messages(TorchDispatchMode):
    """Notes the messages of this rank in the order in which they begin; a batch's, as one."""

    def __enter__(self) -> _Messages:
        self.log: list[_Posted] = []
        self.batch, self._together = dist.batch_isend_irecv, False
        dist.batch_isend_irecv = self._batched
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        dist.batch_isend_irecv = self.batch
        super().__exit__(*error)

    def _batched(self, operations: list[dist.P2POp]) -> Any:
        self.log.append([])
        self._together = True
        try:
            return self.batch(operations)
        finally:
            self._together = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(("c10d.send", "c10d.recv_")):
            if not self._together:
                self.log.append([])
            self.log[-1].append(("send" if "send" in str(func) else "recv", args[2]))
        return func(*args, **(kwargs or {}))


def _stuck(logs: list[list[_Posted]]) -> bool:
    """Whether ranks would wait for ever where every message waits for its other end.

    As nccl does: it connects two ranks at their first message, and both wait until it is done.
    """
    todo = [[set(posted) for posted in log] for log in logs]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(todo):
            for kind, peer in list(mine[0]) if mine else ():
                other = "recv" if kind == "send" else "send"
                if todo[peer] and (other, rank) in todo[peer][0]:
                    mine[0].discard((kind, peer))
                    todo[peer][0].discard((other, rank))
                    moved = True
        for mine in todo:
            while mine and not mine[0]:
                mine.pop(0)
    return any(todo)


_PARITY = "Let even ranks send first and odd ones receive first, or hand both to one batch."
_STUCK = (
    "The output is right, here: gloo lets a rank begin to send and go on. With nccl the first "
    "message between two ranks waits for its other end, and where every rank sends first, nobody "
    f"receives. {_PARITY}"
)


def _on_ranks(fn: Callable[..., Any], size: int, *args: Any) -> list[tuple[Any, ...]]:
    """What `fn` returned on the ranks, item by item; to an answer that hangs, the rule is added."""
    try:
        return list(zip(*run_answer(fn, size, *args, timeout=10), strict=True))
    except Wrong as wrong:
        hangs = "every one waits for another" in str(wrong)
        raise Wrong(f"{wrong}\n{_PARITY}" if hangs else str(wrong)) from None


def _passed(answer: Callable[..., Any]) -> tuple[Any, dict[str, Any], list[_Posted]]:
    mine = torch.arange(3.0) + 10 * dist.get_rank()
    with count.sent() as sent, _Messages() as messages:
        out = answer(mine, dist.group.WORLD)
    return out, sent.collectives, messages.log


@exercise("my_pass")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 3, 4):
        outputs, collectives, logs = _on_ranks(_passed, size, answer)
        every = [torch.arange(3.0) + 10 * rank for rank in range(size)]
        hints = {"Each rank has returned its own tensor.": every}
        if size > 2:
            words = "It went round the other way: rank r sends to rank r + 1."
            hints[words] = [every[(rank + 1) % size] for rank in range(size)]
        before = [every[rank - 1] for rank in range(size)]
        same(outputs, before, "the tensor", 0.0, hints)
        for called in collectives:
            if called:
                raise Wrong(
                    f"The output is right, but it calls {next(iter(called))}: use dist.send and "
                    "dist.recv, or dist.batch_isend_irecv."
                )
        if _stuck(list(logs)):
            raise Wrong(_STUCK)
    return "Right on 2, 3 and 4 ranks; replayed by nccl's rules, nobody waits for ever."


def _heads(rank: int, tokens: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's queries, keys and values: [2, 2, tokens, 4]."""
    generator = torch.Generator().manual_seed(7 + rank)
    q, k, v = torch.randn(3, 2, 2, tokens, 4, generator=generator, dtype=torch.float64)
    return q, 2 * k, v


def _attend(q_BAsD: Tensor, k_BASD: Tensor, v_BASD: Tensor, hidden: Tensor | None = None) -> Tensor:
    scores = q_BAsD @ k_BASD.transpose(-1, -2) / q_BAsD.shape[-1] ** 0.5  # [B, A, s, S]
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v_BASD


def _cache(rank: int, large: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One query, the same on all ranks, and this rank's keys and values of 64 tokens."""
    q = _heads(0)[0][:, :, :1]
    _, k, v = _heads(rank, 64)
    if large:  # scores of 1000 and more, another number on each rank
        k = k + (2000 + 100 * rank) * q / q.square().sum(-1, keepdim=True)
    return q, k, v


def _decoded(answer: Callable[..., Any], large: bool) -> tuple[Any, int]:
    with count.sent() as sent:
        out = answer(*_cache(dist.get_rank(), large), dist.group.WORLD)
    return out, sum(sent.payload.values()) + sent.bytes


@exercise("my_decode")
def _(answer: Callable[..., Any]) -> str:
    for size, large in ((2, False), (4, False), (4, True)):
        outputs, handed = _on_ranks(_decoded, size, answer, large)
        q, k, v = zip(*(_cache(rank, large) for rank in range(size)), strict=True)
        right = _attend(q[0], torch.cat(k, 2), torch.cat(v, 2))
        parts = [_attend(q[0], k[r], v[r]) for r in range(size)]
        if large and not all(isinstance(o, Tensor) and o.isfinite().all() for o in outputs):
            raise Wrong(
                "With scores of 1000 the result is not finite: exp(1000) is too large for any "
                "number. First find the largest logarithm of all ranks, and take exponentials of "
                "differences only."
            )
        same(
            outputs,
            [right] * size,
            "the output",
            1e-9,  # float64; logarithms around 1000 have 12 digits behind the point
            {
                "Each rank has attended to its own keys alone.": parts,
                "It is the mean of the ranks' outputs: a rank counts by the sum of its "
                "exponentials.": [torch.stack(parts).mean(0)] * size,
                "It is the sum of the ranks' outputs: their weights have to add up to 1.": [
                    torch.stack(parts).sum(0)
                ]
                * size,
            },
        )
        if max(handed) >= k[0].nbytes:
            raise Wrong(
                "The output is right, but a rank hands over as many bytes as its keys have. Send "
                "what came of them: an output and a logarithm for each head."
            )
    return f"Right on 2 and 4 ranks: {max(handed)} bytes in place of {2 * k[0].nbytes:,} of keys."


def _ring(answer: Callable[..., Any]) -> tuple[Any, dict[str, Any], int, list[_Posted]]:
    with count.sent() as sent, _Messages() as messages:
        out = answer(*_heads(dist.get_rank()), dist.group.WORLD)
    return out, sent.collectives, sent.bytes, messages.log


@exercise("my_ring")
def _(answer: Callable[..., Any]) -> str:
    blocks = 0.0
    for size in (2, 4):
        outputs, collectives, sent, logs = _on_ranks(_ring, size, answer)
        if any(isinstance(out, Tensor) and out.isnan().any() for out in outputs):
            raise Wrong(
                "Some of the output is nan: a query that sees no key of a block has no softmax "
                "there. Leave out the blocks of later ranks."
            )
        q, k, v = zip(*(_heads(rank) for rank in range(size)), strict=True)
        keys, values, share = torch.cat(k, 2), torch.cat(v, 2), q[0].shape[2]
        hidden = torch.ones(size * share, size * share).triu(1).bool().split(share)
        triangle = torch.ones(share, share).triu(1).bool()
        everywhere = triangle.repeat(1, size)
        each = [
            [_attend(q[r], k[i], v[i], triangle if i == r else None) for i in range(r + 1)]
            for r in range(size)
        ]
        same(
            outputs,
            [_attend(q[r], keys, values, hidden[r]) for r in range(size)],
            "the output",
            1e-11,  # float64, values of order 1, sums in another order
            {
                "It is the ring without a mask: a token sees itself and those before it.": [
                    _attend(mine, keys, values) for mine in q
                ],
                "Each rank has attended to its own keys alone.": [parts[-1] for parts in each],
                "Within its own block a token has seen those behind it.": [
                    _attend(q[r], torch.cat(k[: r + 1], 2), torch.cat(v[: r + 1], 2))
                    for r in range(size)
                ],
                "The triangle is for a rank's own block alone: earlier ranks' keys are all seen.": [
                    _attend(mine, keys, values, everywhere) for mine in q
                ],
                "It is the mean of the blocks' outputs; a block counts by the sum of its "
                "exponentials.": [torch.stack(parts).mean(0) for parts in each],
            },
        )
        for called in collectives:
            if called:
                raise Wrong(
                    f"The output is right, but it calls {next(iter(called))}: pass blocks on "
                    "to the next rank, so that nobody ever holds all of them."
                )
        if _stuck(list(logs)):
            raise Wrong(_STUCK)
        blocks = max(blocks, *(n / (2 * k[0].numel() * 8) for n in sent))  # keys, values; float64
    if blocks > 3:
        return "Right. On 4 ranks it sends 4 blocks or more; 3 are enough: keep the last one."
    return "Right on 2 and 4 ranks: none of 4 sends more than 3 blocks."


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
