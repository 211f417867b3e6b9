"""Exercises of the lesson `collectives`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcourse.exercises.forms import (
    Part,
    Seen,
    Trial,
    calls_at_most,
    cases,
    close,
    nobody_waits,
    number,
    on_ranks,
)
from shardlab import ranks

# Ten float32 in pieces of 3, 3, 2, 2 elements: 12, 12, 8, 8 bytes. Rank 0 sends every piece but
# its own in the reduce-scatter (28 bytes), then every piece but rank 1's in the all-gather (28).
number("ring_bytes", 56, "bytes",
       says="Rank 0 sends pieces 3, 2 and 1 in the first half, and 0, 3 and 2 in the second.",
       wrong={
    60: "60 is 2(N - 1)/N of 40 bytes, the average over the ranks: ten elements do not "
    "divide by four, so the pieces differ. Which two pieces does rank 0 not send?",
    28: "28 bytes is the reduce-scatter alone; the all-gather follows.",
})  # fmt: skip


def _values(size: int, elements: int) -> list[Tensor]:
    """Return one tensor per rank from a fixed seed: all values negative, so that a zero shows."""
    generator = torch.Generator().manual_seed(size * 100 + elements)
    return [-1 - torch.rand(elements, generator=generator) for _ in range(size)]


def _in_place(answer: Callable[..., Any], size: int, elements: int, *root: int) -> Tensor:
    """Run answer(tensor, *root, group) on this rank and return its tensor afterwards."""
    tensor = _values(size, elements)[dist.get_rank()].to(ranks.device())
    answer(tensor, *root, dist.group.WORLD)
    return tensor


_KEPT = (
    "No rank's tensor changed: each still holds what it began with. The result belongs into "
    "`tensor` itself, for example with tensor.copy_(result)."
)
_OURS = calls_at_most(
    0, "build it from ranks.isend and ranks.irecv, or from this lesson's functions."
)


@on_ranks(
    "all_reduce_max",
    ((2, 3), (3, 7), (4, 5)),
    work=_in_place,
    rules=[_OURS],
    says="The same maximum on all of 2, 3 and 4 ranks.",
)
def _(size: int, elements: int) -> Trial:
    values = _values(size, elements)
    top = torch.stack(values).amax(0)
    mistakes = {
        _KEPT: values,
        "All values are below zero and you got zeros: some tensor began as zeros and took part. "
        "Start from a rank's own values.": torch.zeros(elements),
    }
    return Trial([Part(f"the maximum over {size} ranks", top, mistakes)], size=size)


def _shifted(answer: Callable[..., Any], size: int) -> tuple[Any, Tensor]:
    tensor = _values(size, 5)[dist.get_rank()].to(ranks.device())
    return answer(tensor, dist.group.WORLD), tensor


@on_ranks(
    "shift",
    (2, 3, 4),
    work=_shifted,
    rules=[nobody_waits],
    says="Every rank has its left neighbour's tensor, with 2, 3 and 4 ranks, and nobody is stuck.",
)
def _(size: int) -> Trial:
    values = _values(size, 5)
    before = [values[rank - 1] for rank in range(size)]
    mistakes = {
        "It came from the rank after: the ring turns the wrong way.": [*values[1:], values[0]],
    }
    over = {
        "What arrived is right, but it was received into `tensor` itself: while that is being sent "
        "nothing may be received into it. Use a second tensor.": before
    }
    what = f"what came from the rank before, with {size} ranks,"
    return Trial([Part(what, before, mistakes), Part("`tensor` itself", values, over)], size=size)


def _in_pieces(seen: list[Seen]) -> str:
    size, elements = len(seen), {4: 103, 2: 8, 3: 50}[len(seen)]
    longest = -(-elements // size) * 4  # bytes of the longest piece
    # The scatter and the all-gather each send at most the tensor without its shortest piece.
    allowed = 2 * 4 * (elements - elements // size)
    for rank, sent in enumerate(one.sent for one in seen):
        text = f"The values are right. But with {size} ranks, rank {rank} sends "
        if sent.messages and sent.bytes > sent.messages * longest:
            return (
                f"{text}{sent.bytes / sent.messages:.0f} bytes per message, of {4 * elements} in "
                "all: nobody can pass a part on before all has arrived. Send pieces."
            )
        if sent.bytes > allowed:
            return (
                f"{text}{sent.bytes} bytes, and {allowed} are enough: the root need not send "
                "every piece to everyone."
            )
    return ""


@on_ranks(
    "broadcast_large",
    ((4, 103, 2), (2, 8, 0), (3, 50, 1)),
    work=_in_place,
    rules=[_OURS, _in_pieces],
    says="Right, and no rank sends more than 2(N - 1)/N of the tensor.",
)
def _(size: int, elements: int, root: int) -> Trial:
    values = _values(size, elements)
    mistakes = {
        _KEPT: values,
    }
    what = f"the tensor of root {root}, with {size} ranks,"
    return Trial([Part(what, values[root], mistakes)], size=size)


def _bucket(size: float, latency: float, bandwidth: float, fraction: float) -> float:
    return size * latency * bandwidth * (1 - fraction) / fraction


cases(
    "my_bucket_bytes",
    ((8, 1e-5, 25e9, 0.1), (64, 5e-6, 50e9, 0.2)),
    _bucket,
    equal=close(1e-3),
    says="Right: N α B (1 - fraction)/fraction, so twice the ranks want buckets of twice the size.",
    mistakes={
        "That is right for one message, and the ring's messages are only an N-th of the bucket: "
        "with N ranks it has to be N times as large.": lambda n, a, b, s: _bucket(1, a, b, s),
        "That compares latency with the time of the bytes. The share is of all the time, latency "
        "included.": lambda n, a, b, s: n * a * b / s,
    },
)
