"""Exercises of the lesson `collectives`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcourse.exercises.forms import (
    Output,
    RankRecord,
    Trial,
    add_cases,
    add_number,
    add_trials,
    check_nccl_deadlock,
    limit_calls,
    make_isclose,
)
from shardlab import ranks

# Ten float32 in pieces of 3, 3, 2, 2 elements: 12, 12, 8, 8 bytes. Rank 0 sends every piece but
# its own in the reduce-scatter (28 bytes), then every piece but rank 1's in the all-gather (28).
add_number("ring_bytes", 56, "bytes",
       success="Rank 0 sends pieces 3, 2 and 1 in the first half, and 0, 3 and 2 in the second.",
       hints={
    60: "60 is 2(N - 1)/N of 40 bytes, the average over the ranks: ten elements do not "
    "divide by four, so the pieces differ. Which two pieces does rank 0 not send?",
    28: "28 bytes is the reduce-scatter alone; the all-gather follows.",
})  # fmt: skip


def _make_values(size: int, elements: int) -> list[Tensor]:
    """Return one tensor per rank from a fixed seed: all values negative, so that a zero shows."""
    generator = torch.Generator().manual_seed(size * 100 + elements)
    return [-1 - torch.rand(elements, generator=generator) for _ in range(size)]


def _run_in_place(
    answer: Callable[..., Any], group: dist.ProcessGroup, size: int, elements: int, *root: int
) -> Tensor:
    tensor = _make_values(size, elements)[dist.get_rank()].to(ranks.device())
    answer(tensor, *root, group)
    return tensor


_UNCHANGED_HINT = (
    "No rank's tensor changed: each still holds its first values. Write the result into "
    "`tensor` itself, for example with tensor.copy_(result)."
)
_NO_COLLECTIVES = limit_calls(
    0, "build it from ranks.isend and ranks.irecv, or from this lesson's functions."
)


@add_trials(
    "all_reduce_max",
    ((2, 3), (3, 7), (4, 5)),
    rank_fn=_run_in_place,
    rules=[_NO_COLLECTIVES, check_nccl_deadlock],
    success="Right: all ranks have the same maximum, with 2, 3 and 4 ranks.",
)
def _(size: int, elements: int) -> Trial:
    values = _make_values(size, elements)
    top = torch.stack(values).amax(0)
    mistakes = {
        _UNCHANGED_HINT: values,
        "All values are below zero and you got zeros: some tensor began as zeros and took part. "
        "Start from a rank's own values.": torch.zeros(elements),
    }
    return Trial([Output(f"the maximum over {size} ranks", top, mistakes)], size=size)


def _run_shift(
    answer: Callable[..., Any], group: dist.ProcessGroup, size: int
) -> tuple[Any, Tensor]:
    tensor = _make_values(size, 5)[dist.get_rank()].to(ranks.device())
    return answer(tensor, group), tensor


@add_trials(
    "shift",
    (2, 3, 4),
    rank_fn=_run_shift,
    rules=[check_nccl_deadlock],
    success="Right: each of 2, 3 and 4 ranks has its left neighbour's tensor, without a deadlock.",
)
def _(size: int) -> Trial:
    values = _make_values(size, 5)
    before = [values[rank - 1] for rank in range(size)]
    mistakes = {
        "It is the right neighbour's: the ring turns the wrong way.": [*values[1:], values[0]]
    }
    over = {
        "The received values are right, but they are in `tensor` itself: while `tensor` is being "
        "sent, nothing may be received into it. Use a second tensor.": before
    }
    what = f"what came from the rank before, with {size} ranks,"
    outputs = [Output(what, before, mistakes), Output("`tensor` itself", values, over)]
    return Trial(outputs, size=size)


def _check_pieces(records: list[RankRecord]) -> str:
    size, elements = len(records), {4: 103, 2: 8, 3: 50}[len(records)]
    longest = -(-elements // size) * 4  # bytes of the longest piece
    # The scatter and the all-gather each send at most the tensor without its shortest piece.
    allowed = 2 * 4 * (elements - elements // size)
    for rank, sent in enumerate(one.traffic for one in records):
        text = f"The values are right. But with {size} ranks, rank {rank} sends "
        if sent.messages and sent.bytes > sent.messages * longest:
            return (
                f"{text}{sent.bytes / sent.messages:.0f} bytes per message, of {4 * elements} in "
                "all: no rank can pass a part on before the whole has arrived. Send pieces."
            )
        if sent.bytes > allowed:
            return (
                f"{text}{sent.bytes} bytes, and {allowed} are enough: the root need not send "
                "every piece to everyone."
            )
    return ""


@add_trials(
    "broadcast_large",
    ((4, 103, 2), (2, 8, 0), (3, 50, 1)),
    rank_fn=_run_in_place,
    rules=[_NO_COLLECTIVES, _check_pieces, check_nccl_deadlock],
    success="Right, and no rank sends more than 2(N - 1)/N of the tensor.",
)
def _(size: int, elements: int, root: int) -> Trial:
    values = _make_values(size, elements)
    mistakes = {_UNCHANGED_HINT: values}
    what = f"the tensor of root {root}, with {size} ranks,"
    return Trial([Output(what, values[root], mistakes)], size=size)


def _size_bucket(size: float, latency: float, bandwidth: float, fraction: float) -> float:
    return size * latency * bandwidth * (1 - fraction) / fraction


add_cases(
    "my_bucket_bytes",
    ((8, 1e-5, 25e9, 0.1), (64, 5e-6, 50e9, 0.2)),
    _size_bucket,
    equal=make_isclose(1e-3),
    success="Right: N α B (1 - fraction)/fraction, so twice the ranks need twice the bucket size.",
    mistakes={
        "That is right for one message, and the ring's messages are only an N-th of the bucket: "
        "with N ranks it has to be N times as large.": lambda n, a, b, s: _size_bucket(1, a, b, s),
        "That compares latency with the time of the bytes. The share is of all the time, latency "
        "included.": lambda n, a, b, s: n * a * b / s,
    },
)
