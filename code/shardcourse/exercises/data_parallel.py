"""Exercises of the lesson `data_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardcourse.exercises import Wrong
from shardcourse.exercises.forms import Part, Seen, Trial, cases, number, on_ranks
from shardlab.data_parallel import DataParallel
from shardlab.measure import count

_SIZE = 4 * 124e6  # bytes of gradients
number("ddp_bytes", 2 * 7 / 8 * _SIZE, "bytes", rel=0.005,
       says="Right: 2 (N-1)/N of 496 MB, whatever the batch size is.", wrong={
    2 * 7 / 8 * 124e6: "A gradient in float32 takes four bytes.",
    7 / 8 * _SIZE: "That is the reduce-scatter alone: the sums have to come back as well.",
})  # fmt: skip
number("overlap_floor", 0.14, "s", rel=0.001,
       says="Right: 0.04 + max(0.05, 0.10) s. The wire is busy to the end: no faster GPU helps.",
       wrong={
    0.19: "That is the step without any overlap: forward, backward and wire one by one.",
    0.10: "The wire is busy that long, but it cannot start before forward has ended.",
})  # fmt: skip


class _Toy(nn.Module):
    """Model with two layers that are always used, one that is used on demand, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(3, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 1)
        self.extra = nn.Linear(4, 1)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        y = self.frozen(self.first(x).tanh())  # [batch, 4]
        return (self.last(y) + (self.extra(y) if extra else 0)).square().mean()

    def gradients(self) -> Tensor:
        """Return all gradients in one flat tensor, with zeros where a parameter has none."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
        )


def _local_batch(rank: int, part: int = 0) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * rank + part))


def _local(rank: int, extra: bool, parts: Sequence[int] = (0,)) -> Tensor:
    """Return the gradient that one rank computes alone, summed over its micro-batches."""
    model = _Toy()
    for part in parts:
        model(_local_batch(rank, part), extra).backward()
    return model.gradients()


def _average(answer: Callable[..., Any], size: int, users: Sequence[int]) -> tuple[Tensor, bool]:
    """Return the gradients, and whether a layer that no rank used has a gradient now."""
    rank, model = dist.get_rank(), _Toy()
    model(_local_batch(rank), rank in users).backward()
    answer(model, dist.group.WORLD)
    found = any(p.grad is not None for p in model.extra.parameters())
    return model.gradients(), found and not users


def _none_stays(seen: list[Seen]) -> str:
    if not any(one.more[0] for one in seen):
        return ""
    return (
        "A layer that no rank used has a gradient of zeros now, and AdamW's weight decay would "
        "move it: its `grad` has to stay None. How does a rank learn that no other has a gradient?"
    )


@on_ranks(
    "my_exact_average",
    ((2, (0, 1)), (4, (0, 1, 2, 3)), (2, (0,)), (2, ())),
    work=_average,
    rules=[_none_stays],
    says="Right: equal to the average on 2 and 4 ranks, with a frozen layer, with one that only "
    "rank 0 used, and None for one that nobody used.",
)
def _(size: int, users: Sequence[int]) -> Trial:
    local = [_local(rank, rank in users) for rank in range(size)]
    total = torch.stack(local).sum(0)
    mistakes = {
        f"It is the sum over the ranks, {size} times the average.": total,
        "Every rank still has its own gradient: nothing was averaged.": local,
    }
    # float32, values up to about 1: the order of four additions may differ
    return Trial([Part("the gradient", total / size, mistakes, 1e-6)], size=size)


_COUNTS = (4, 1, 2)


def _samples(rank: int) -> Tensor:
    return torch.cat([_local_batch(rank), _local_batch(rank, 1)])[: _COUNTS[rank]]  # [samples, 3]


def _joined(answer: Callable[..., Any], size: int) -> Any:
    weight, x = torch.ones(3, requires_grad=True), _samples(dist.get_rank())
    value = answer((x @ weight).square().sum(), len(x), dist.group.WORLD)
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise Wrong("The returned loss does not depend on loss_sum any more: no .item(), please.")
    value.backward()
    dist.all_reduce(weight.grad)  # [3]
    return weight.grad / size


@on_ranks(
    "my_joined_loss",
    (len(_COUNTS),),
    work=_joined,
    says="Right: with 4, 1 and 2 samples on three ranks it is the joined batch's gradient.",
)
def _(size: int) -> Trial:
    def gradient(*weights: float) -> Tensor:
        w = torch.ones(3, requires_grad=True)
        sum(c * (_samples(r) @ w).square().sum() for r, c in enumerate(weights)).backward()
        return w.grad

    total = sum(_COUNTS)
    mistakes = {
        "It is the average of the ranks' own means: a sample on the rank with the short batch "
        "counts more than the others.": gradient(*(1 / c / size for c in _COUNTS)),
        f"It is {size} times too small: DataParallel divides by the number of ranks once more.": (
            gradient(*[1 / total / size] * size)
        ),
    }
    # float32, values up to about 10
    right = gradient(*[1 / total] * size)
    return Trial([Part("the averaged gradient", right, mistakes, 1e-5)], size=size)


def _accumulated(answer: Callable[..., Any], size: int, parts: int) -> tuple[Any, ...]:
    rank = dist.get_rank()
    model = DataParallel(_Toy(), dist.group.WORLD, bucket_bytes=64, first_bytes=64)
    with count.record_traffic() as sent:
        answer(model, lambda x: model(x, True), [_local_batch(rank, part) for part in range(parts)])
    return model.module.gradients(), sent.calls["all_reduce"], len(model.buckets)


def _each_bucket_once(seen: list[Seen]) -> str:
    sent, buckets = seen[0].more
    if sent <= buckets:
        return ""
    return (
        f"The gradient is right, but rank 0 sent {sent} messages for {buckets} buckets: all "
        "micro-batches but the last belong inside model.no_sync()."
    )


@on_ranks(
    "my_accumulate",
    ((2, 3),),
    work=_accumulated,
    rules=[_each_bucket_once],
    says="Right: the mean over 2 ranks and 3 micro-batches, each bucket sent once.",
)
def _(size: int, parts: int) -> Trial:
    sums = [_local(rank, True, range(parts)) for rank in range(size)]
    right = sum(sums) / size / parts
    mistakes = {
        f"It is {parts} times too large: each micro-batch's loss is a mean of its own.": (
            parts * right
        ),
        "Every rank has its own gradient alone: run the last backward outside no_sync().": [
            total / parts for total in sums
        ],
    }
    # float32, values up to about 1
    return Trial([Part("the gradient", right, mistakes, 1e-6)], size=size)


def _micro_batches(
    size: float,
    n: int,
    bandwidth: float,
    forward: float,
    backward: float,
    fraction: float,
    hidden: Callable[[int, float], float] = lambda m, backward: backward,
) -> int:
    """Count micro-batches so that communication exposes at most `fraction` of the step."""
    wire = 2 * (n - 1) / n * size / bandwidth
    for m in range(1, 10_000):
        waiting = max(0.0, wire - hidden(m, backward))
        if waiting <= fraction * (m * (forward + backward) + waiting):
            return m
    raise AssertionError


cases(
    "my_micro_batches",
    # Bytes of gradients, ranks, bytes/s, seconds of a micro-batch's forward and backward, fraction.
    (
        (2e9, 8, 12.5e9, 0.05, 0.10, 0.05),  # sends for 280 ms, 100 hidden: 23 of 150 ms
        (14e9, 64, 25e9, 0.10, 0.20, 0.10),
        (1e9, 4, 50e9, 0.02, 0.04, 0.05),  # all communication is hidden: one micro-batch is enough
    ),
    _micro_batches,
    says="Right: waiting stays, and is shared by ever more micro-batches.",
    mistakes={
        "You let nothing overlap: the last backward hides what it can.": partial(
            _micro_batches, hidden=lambda m, backward: 0.0
        ),
        "You let every backward hide a part. Inside no_sync() nothing is sent: the last one alone "
        "hides anything.": partial(_micro_batches, hidden=lambda m, backward: m * backward),
    },
)
