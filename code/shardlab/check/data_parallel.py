"""The checks of lesson `data_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlab import count
from shardlab.check import Wrong, called, exercise, number, run_answer, same
from shardlab.data_parallel import DataParallel

_WAITS = (
    " Does a rank that has no gradient for a parameter take part in that parameter's all-reduce?"
)


class _Toy(nn.Module):
    """Two layers that are always used, one that is used on demand, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(3, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 1)
        self.extra = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        y = self.frozen(self.first(x).tanh())  # [batch, 4]
        return (self.last(y) + (self.extra(y) if extra else 0)).square().mean()

    def gradients(self) -> torch.Tensor:
        """All gradients in one flat tensor, zeros where there are none."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
        )

    def weights(self) -> torch.Tensor:
        """All parameters in one flat tensor."""
        return torch.cat([p.detach().flatten() for p in self.parameters()])


def _share(rank: int, part: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * rank + part))


def _local(rank: int, extra: bool, parts: Sequence[int] = (0,)) -> torch.Tensor:
    """The gradient that one rank computes alone, summed over its micro-batches."""
    model = _Toy()
    for part in parts:
        model(_share(rank, part), extra).backward()
    return model.gradients()


def _average(
    answer: Callable[..., Any], users: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """Gradients, weights, and which of the extra layer's gradients are None, on each rank."""
    rank, model = dist.get_rank(), _Toy()
    model(_share(rank), rank in users).backward()
    answer(model, dist.group.WORLD)
    return model.gradients(), model.weights(), [p.grad is None for p in model.extra.parameters()]


@exercise("my_exact_average")
def exact_average(answer: Callable[..., Any]) -> str:
    """Averages where some rank has a gradient, None where no rank has one."""
    for size, users in ((2, (0, 1)), (4, (0, 1, 2, 3)), (2, (0,)), (2, ())):
        try:
            results = run_answer(_average, size, answer, users, timeout=10)
        except Wrong as wrong:
            raise Wrong(f"{wrong}{'' if len(users) == size else _WAITS}") from None
        local = [_local(rank, rank in users) for rank in range(size)]
        total = torch.stack(local).sum(0)
        if any(not torch.equal(weights, _Toy().weights()) for _, weights, _ in results):
            raise Wrong(
                "The parameters themselves have changed: average `parameter.grad`, and leave the "
                "step to the optimizer."
            )
        same(
            [gradient for gradient, _, _ in results],
            [total / size] * size,
            "the gradient",
            1e-6,  # float32, values up to about 1: the order of four additions
            {
                f"It is the sum over the ranks, {size} times the average.": [total] * size,
                "Every rank still has its own gradient: nothing was averaged.": local,
            },
        )
        if not users and not all(all(none) for _, _, none in results):
            raise Wrong(
                "A layer that no rank used has a gradient of zeros now, and AdamW's weight decay "
                "would move it: its `grad` has to stay None. How does a rank learn that no other "
                "one has a gradient?"
            )
    return (
        "Right: equal to the average on 2 and 4 ranks, with a frozen layer, with one that only "
        "rank 0 used, and None for one that nobody used."
    )


def _joined(answer: Callable[..., Any]) -> torch.Tensor | None:
    rank = dist.get_rank()
    weight = torch.ones(3, requires_grad=True)
    samples = _COUNTS[rank]
    x = torch.cat([_share(rank), _share(rank, 1)])[:samples]  # [samples, 3]
    value = answer((x @ weight).square().sum(), samples, dist.group.WORLD)
    if not isinstance(value, torch.Tensor):
        return value
    if not value.requires_grad:
        raise ValueError(
            "the returned loss does not depend on loss_sum any more: no .item(), please"
        )
    value.backward()
    dist.all_reduce(weight.grad)  # [3]
    return weight.grad / dist.get_world_size()


_COUNTS = (4, 1, 2)


@exercise("my_joined_loss")
def joined_loss(answer: Callable[..., Any]) -> str:
    """A loss whose averaged gradients are those of the joined batch."""
    size = len(_COUNTS)

    def gradient(weights: Sequence[float]) -> list[torch.Tensor]:
        w = torch.ones(3, requires_grad=True)
        parts = [torch.cat([_share(r), _share(r, 1)])[: _COUNTS[r]] for r in range(size)]
        sum(c * (x @ w).square().sum() for c, x in zip(weights, parts, strict=True)).backward()
        return [w.grad] * size

    total = sum(_COUNTS)
    same(
        run_answer(_joined, size, answer, timeout=10),
        gradient([1 / total] * size),
        "the averaged gradient",
        1e-5,  # float32, values up to about 10
        {
            "It is the average of the ranks' own means: a sample on the rank with the short batch "
            "counts more than the others.": gradient([1 / c / size for c in _COUNTS]),
            f"It is {size} times too small: DataParallel divides by the number of ranks once more."
            "": gradient([1 / total / size] * size),
            "It is the average of the sums: nothing was divided by the number of samples."
            "": gradient([1 / size] * size),
        },
    )
    return "Right: with 4, 1 and 2 samples on three ranks it is the joined batch's gradient."


def _accumulated(answer: Callable[..., Any], parts: int) -> tuple[torch.Tensor, int, int]:
    rank = dist.get_rank()
    model = DataParallel(_Toy(), dist.group.WORLD, bucket_bytes=64, first_bytes=64)
    with count.sent() as sent:
        answer(model, lambda x: model(x, True), [_share(rank, part) for part in range(parts)])
    return model.module.gradients(), sent.calls["all_reduce"], len(model.buckets)


@exercise("my_accumulate")
def accumulate(answer: Callable[..., Any]) -> str:
    """Micro-batches whose gradients are sent once."""
    size, parts = 2, 3
    results = run_answer(_accumulated, size, answer, parts, timeout=10)
    sums = [_local(rank, True, range(parts)) for rank in range(size)]
    right = [sum(sums) / size / parts] * size
    same(
        [gradient for gradient, _, _ in results],
        right,
        "the gradient",
        1e-6,  # float32, values up to about 1
        {
            f"It is {parts} times too large: each micro-batch's loss is a mean of its own.": [
                sum(sums) / size
            ]
            * size,
            "Every rank has its own gradient alone: run the last backward outside no_sync().": [
                total / parts for total in sums
            ],
            "No backward ran.": [torch.zeros_like(right[0])] * size,
        },
    )
    sent, buckets = results[0][1:]
    if sent > buckets:
        raise Wrong(
            f"The gradient is right, but rank 0 sent {sent} messages for {buckets} buckets: all "
            "micro-batches but the last belong inside model.no_sync()."
        )
    return f"Right: the mean over {size} ranks and {parts} micro-batches, each bucket sent once."


@exercise("ddp_bytes")
def ddp_bytes(answer: Any) -> str:
    """Bytes that a rank sends in a step."""
    size = 4 * 124e6  # bytes of gradients
    number(
        answer,
        2 * 7 / 8 * size,
        "bytes",
        rel=0.005,
        hints={
            2 * 7 / 8 * 124e6: "A gradient in float32 takes four bytes.",
            7 / 8 * size: "That is the reduce-scatter alone: the sums have to come back as well.",
            2 * size: "That is the limit for very many ranks; with 8 an eighth stays at home.",
            size: "The gradients are that large, but a rank does not send them just once: think of "
            "the two halves of a ring all-reduce.",
            7 * size: "That is every rank sending everything to all others; a ring does better.",
        },
    )
    return "Right: 2 (N-1)/N of 496 MB, whatever the batch size is."


@exercise("overlap_floor")
def overlap_floor(answer: Any) -> str:
    """The shortest step that overlap allows."""
    number(
        answer,
        0.14,
        "s",
        rel=0.001,
        hints={
            0.19: "That is the step without any overlap: forward, backward and wire one by one.",
            0.09: "That is compute alone, and the wire needs longer than backward.",
            0.10: "The wire is busy that long, but it cannot start before forward has ended.",
        },
    )
    return (
        "Right: 0.04 + max(0.05, 0.10) s. The wire is busy to the end: a faster GPU gains little."
    )


# Bytes of gradients, ranks, bytes/s, seconds of a micro-batch forward and backward, the share.
_JOBS = (
    (2e9, 8, 12.5e9, 0.05, 0.10, 0.05),  # 280 ms of wire, of which 100 are hidden: 23 of 150 ms
    (14e9, 64, 25e9, 0.10, 0.20, 0.10),
    (1e9, 4, 50e9, 0.02, 0.04, 0.05),  # hidden altogether: one is enough
)


def _micro_batches(
    size: float, n: int, bandwidth: float, forward: float, backward: float, share: float, how: str
) -> int:
    """Micro-batches until waiting is at most `share` of the step; how "": right, else a mistake."""
    wire = size / bandwidth * (1 if how == "ring" else 2 * (n - 1) / n)
    for m in range(1, 10_000):
        hidden = {"none": 0.0, "all": m * backward}.get(how, backward)
        work = m * (backward if how == "forward" else forward + backward)
        waiting = max(0.0, wire - hidden)
        if waiting <= share * (work + (0 if how == "work" else waiting)):
            return m
    raise AssertionError


_SLIPS = {
    "none": "You let nothing overlap: the last backward hides what it can.",
    "all": "You let every backward hide a part. Inside no_sync() nothing is sent: the last one "
    "alone hides anything.",
    "ring": "A ring sends 2 (N - 1)/N of the gradients, and not the gradients once.",
    "forward": "A step computes forward passes as well.",
    "work": "The share is of the whole step, waiting included, and not of its arithmetic.",
}


@exercise("my_micro_batches")
def micro_batches(answer: Callable[..., Any]) -> str:
    """The fewest micro-batches that keep the waiting below a share of the step."""
    for job in _JOBS:
        found = called(answer, *job)
        want = _micro_batches(*job, "")
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise Wrong(f"It returned {found!r}: a step has a whole number of micro-batches, 1 up.")
        if found != want:
            where = f"With {job[0] / 1e9:g} GB on {job[1]} ranks, {found} is too "
            where += "few." if found < want else "many."
            slips = [text for how, text in _SLIPS.items() if found == _micro_batches(*job, how)]
            raise Wrong(" ".join([where, *slips[:1]]))
    return "Right: waiting stays, and is shared by ever more micro-batches."
