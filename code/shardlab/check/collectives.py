"""The exercises of lesson `collectives`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardlab import collectives, count, ranks

from . import (
    Wrong,
    called,
    exercise,
    messages_of,
    number,
    refuse_a_ring_that_hangs,
    run_answer,
    same,
)

_PATIENCE = 5.0  # seconds; a right answer takes a tenth of one, so who is not back by then is stuck


def _values(size: int, elements: int) -> list[torch.Tensor]:
    """One tensor per rank, known to both sides: all below zero, so that a zero stands out."""
    generator = torch.Generator().manual_seed(size * 100 + elements)
    return [-1 - torch.rand(elements, generator=generator) for _ in range(size)]


def _in_place(
    answer: Callable[..., Any], values: list[torch.Tensor], *arguments: Any
) -> list[dict[str, Any]]:
    """Run answer(tensor, *arguments, group) on each rank: the tensor it left, what it sent."""

    def run() -> dict[str, Any]:
        tensor = values[dist.get_rank()].to(ranks.device())
        with count.sent() as sent:
            returned, log = messages_of(answer, tensor, *arguments, dist.group.WORLD)
        return {
            "tensor": tensor,
            "returned": returned is not None,
            "bytes": sent.bytes,
            "messages": sent.messages,
            "collectives": list(sent.collectives),
            "log": log,
        }

    try:
        found = run_answer(run, len(values), timeout=_PATIENCE)
    except Wrong as wrong:
        raise Wrong(_stuck(str(wrong))) from None
    for rank, mine in enumerate(found):
        if mine["collectives"]:
            raise Wrong(
                f"Rank {rank} called torch.distributed's own {mine['collectives'][0]}. "
                "Build it from ranks.isend and ranks.irecv, or from this lesson's functions."
            )
    if all(torch.equal(mine["tensor"], own) for mine, own in zip(found, values, strict=True)):
        if any(mine["returned"] for mine in found):
            raise Wrong(
                "Your function returned something and left `tensor` as it was: the result belongs "
                "into `tensor` itself, for example with tensor.copy_(result)."
            )
        raise Wrong("No rank's tensor changed: each still holds what it began with.")
    return found


def _stuck(message: str) -> str:
    """What `run_answer` says of a run, with a hint when its ranks waited until time was up."""
    if f"within {_PATIENCE:g} s" in message:
        message += "\nSomebody waits for what nobody sends, or sends what nobody receives."
    return message


@exercise("ring_bytes")
def _ring_bytes(answer: Any) -> str:
    # Ten float32 in pieces of 3, 3, 2, 2 elements: 12, 12, 8, 8 bytes. Rank 0 sends all but its own
    # piece (28), then all but rank 1's (28).
    number(
        answer,
        collectives.bytes_sent("all_reduce ring", 40, 4, size=4, rank=0),
        "bytes",
        hints={
            60: "60 is 2(N - 1)/N of 40 bytes, the average over the ranks: ten elements do not "
            "divide by four, so the pieces differ. Which two pieces does rank 0 not send?",
            28: "28 bytes is the reduce-scatter alone; the all-gather follows.",
            14: "14 is the number of elements. A float32 has 4 bytes.",
            120: "120 bytes is what rank 0 sends in the naive way, the whole tensor three times.",
            80: "80 bytes is the tensor twice: in each half there is a piece that rank 0 keeps.",
        },
    )
    return (
        "Rank 0 sends pieces 3, 2 and 1 in the first half and 0, 3 and 2 in the second: 56 bytes."
    )


@exercise("all_reduce_max")
def _all_reduce_max(answer: Any) -> str:
    for size, elements in ((2, 3), (3, 7), (4, 5)):
        values = _values(size, elements)
        found = _in_place(answer, values)
        got = [mine["tensor"] for mine in found]
        top = torch.stack(values).amax(0)
        total = torch.stack(values).sum(0)
        if torch.equal(got[0], top) and not all(torch.equal(mine, top) for mine in got):
            raise Wrong(
                f"With {size} ranks, rank 0 has the largest values and the others do not: "
                "one half of an all-reduce is missing."
            )
        same(
            got,
            [top] * size,
            f"the maximum over {size} ranks",
            hints={
                "That is the sum, not the maximum.": [total] * size,
                "All values are below zero and you got zeros: some tensor began as zeros and took "
                "part. Start from a rank's own values.": [torch.zeros(elements)] * size,
            },
        )
    return "The same maximum on all of 2, 3 and 4 ranks."


@exercise("shift")
def _shift(answer: Any) -> str:
    for size in (2, 3, 4):
        values = _values(size, 5)

        def run(values: list[torch.Tensor] = values) -> tuple[Any, torch.Tensor, Any]:
            tensor = values[dist.get_rank()].to(ranks.device())
            received, log = messages_of(answer, tensor, dist.group.WORLD)
            return received, tensor, log

        try:
            found = run_answer(run, size, timeout=_PATIENCE)
        except Wrong as wrong:
            raise Wrong(_stuck(str(wrong))) from None
        got = [received for received, *_ in found]
        same(
            got,
            [values[rank - 1] for rank in range(size)],
            f"what came from the rank before, with {size} ranks,",
            hints={
                "It came from the rank after: the ring turns the wrong way.": [
                    values[(rank + 1) % size] for rank in range(size)
                ],
                "It is the rank's own tensor.": values,
            },
        )
        if not all(torch.equal(kept, own) for (_, kept, _), own in zip(found, values, strict=True)):
            raise Wrong(
                "What arrived is right, but `tensor` itself was overwritten: while it is being "
                "sent nothing may be received into it. Use a second tensor."
            )
        refuse_a_ring_that_hangs([log for *_, log in found])
    return "Every rank has its left neighbour's tensor, with 2, 3 and 4 ranks, and nobody is stuck."


@exercise("broadcast_large")
def _broadcast_large(answer: Any) -> str:
    for size, elements, root in ((4, 103, 2), (2, 8, 0), (3, 50, 1)):
        values = _values(size, elements)
        found = _in_place(answer, values, root)
        got = [mine["tensor"] for mine in found]
        same(
            got,
            [values[root]] * size,
            f"the tensor of root {root}, with {size} ranks,",
            hints={"That is rank 0's tensor: `root` was not looked at.": [values[0]] * size},
        )
        nbytes = values[0].nbytes
        longest = -(-elements // size) * 4  # bytes of the longest piece
        for rank, mine in enumerate(found):
            if mine["messages"] and mine["bytes"] > mine["messages"] * longest:
                raise Wrong(
                    f"The values are right. But with {size} ranks, rank {rank} sends "
                    f"{mine['bytes'] / mine['messages']:.0f} bytes per message, of {nbytes} in "
                    "all: nobody can pass a part on before all has arrived. Send pieces."
                )
            # The scatter and the all-gather: each at most the tensor but for the shortest piece.
            allowed = 2 * (nbytes - elements // size * 4)
            if mine["bytes"] > allowed:
                raise Wrong(
                    f"The values are right. But with {size} ranks, rank {rank} sends "
                    f"{mine['bytes']} bytes, and {allowed} are enough: the root need not send "
                    "every piece to everyone."
                )
    return "Right, and no rank sends more than 2(N - 1)/N of the tensor."


@exercise("my_bucket_bytes")
def _bucket_bytes(answer: Any) -> str:
    for size, latency, bandwidth, share in ((8, 1e-5, 25e9, 0.1), (64, 5e-6, 50e9, 0.2)):
        found = called(answer, size, latency, bandwidth, share)
        wire = latency * bandwidth  # the bytes that could travel while one latency passes
        of_time, of_transfer = (1 - share) / share, 1 / share
        number(
            found,
            size * wire * of_time,
            f"bytes, on {size} ranks,",
            rel=1e-3,
            hints={
                wire
                * of_time: "That is right for one message, and the ring's messages are only an "
                "N-th of the bucket: with N ranks it has to be N times as large.",
                size * wire * of_transfer: "That compares latency with the time of the bytes. The "
                "share is of all the time, latency included.",
                wire * of_transfer: "The ring's messages are an N-th of the bucket, and the share "
                "is of all the time, latency included.",
                2
                * size
                * wire
                * of_time: "Twice too much: both halves of the ring have latencies, "
                "and both have bytes.",
                2 * (size - 1) * wire * of_time: "That counts the latencies of all 2 (N - 1) "
                "messages, and the bytes of one sending of the whole bucket. Count 2 (N - 1)/N.",
                size
                * wire
                * of_time
                / 4: "That is the number of float32 numbers; bytes are asked.",
                collectives.CostModel(latency, bandwidth).crossover(size): "That is where the ring "
                "begins to beat the tree; there latency is still most of its time.",
            },
        )
    return "Right: N α B (1 - share)/share, so twice the ranks want buckets of twice the size."
