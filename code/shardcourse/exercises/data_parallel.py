"""Exercises of the lesson `data_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardcourse.exercises import WrongAnswer
from shardcourse.exercises.forms import Output, RankRecord, Trial, add_cases, add_number, add_trials
from shardlab.data_parallel import DataParallel
from shardlab.measure import count

_BYTES = 4 * 124e6  # bytes of gradients
add_number("ddp_bytes", 2 * 7 / 8 * _BYTES, "bytes", rel_tol=0.005,
       success="Right: 2 (N-1)/N of 496 MB, whatever the batch size is.", hints={
    2 * 7 / 8 * 124e6: "A gradient in float32 takes four bytes.",
    7 / 8 * _BYTES: "That is the reduce-scatter alone: the sums have to come back as well.",
})  # fmt: skip
add_number("overlap_floor", 0.14, "s", rel_tol=0.001,
       success="Right: 0.04 + max(0.05, 0.10) s. The network is the limit, not the GPU.",
       hints={
    0.19: "That is the step without any overlap: forward, backward and network one by one.",
    0.10: "The network is busy that long, but it cannot start before forward has ended.",
})  # fmt: skip


class _ToyModel(nn.Module):
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

    def flatten_gradients(self) -> Tensor:
        """Return all gradients in one flat tensor, with zeros where a parameter has none."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
        )


def _make_batch(rank: int, part: int = 0) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * rank + part))


def _compute_local_gradient(rank: int, extra: bool, parts: Sequence[int] = (0,)) -> Tensor:
    """Return the gradient that one rank computes alone, summed over its micro-batches."""
    model = _ToyModel()
    for part in parts:
        model(_make_batch(rank, part), extra).backward()
    return model.flatten_gradients()


def _run_average(answer: Callable, size: int, users: Sequence[int]) -> tuple[Tensor, bool]:
    """Return the gradients, and whether a layer that no rank used has a gradient now."""
    rank, model = dist.get_rank(), _ToyModel()
    model(_make_batch(rank), rank in users).backward()
    answer(model, dist.group.WORLD)
    found = any(p.grad is not None for p in model.extra.parameters())
    return model.flatten_gradients(), found and not users


def _check_grad_none(records: list[RankRecord]) -> str:
    if not any(one.extras[0] for one in records):
        return ""
    return (
        "A layer that no rank used has a gradient of zeros now, and AdamW's weight decay would "
        "move it: its `grad` has to stay None. How does a rank learn that no other has one?"
    )


@add_trials(
    "my_exact_average",
    ((2, (0, 1)), (4, (0, 1, 2, 3)), (2, (0,)), (2, ())),
    rank_fn=_run_average,
    rules=[_check_grad_none],
    success="Right: equal to the average on 2 and 4 ranks, with a frozen layer, with one that only "
    "rank 0 used, and None for one that no rank used.",
)
def _(size: int, users: Sequence[int]) -> Trial:
    local = [_compute_local_gradient(rank, rank in users) for rank in range(size)]
    total = torch.stack(local).sum(0)
    mistakes = {
        f"It is the sum over the ranks, {size} times the average.": total,
        "Every rank still has its own gradient: nothing was averaged.": local,
    }
    # float32, values up to about 1: the order of four additions may differ
    return Trial([Output("the gradient", total / size, mistakes, 1e-6)], size=size)


_NUM_SAMPLES = (4, 1, 2)


def _make_samples(rank: int) -> Tensor:
    both = torch.cat([_make_batch(rank), _make_batch(rank, 1)])
    return both[: _NUM_SAMPLES[rank]]  # [samples, 3]


def _run_joined_loss(answer: Callable[..., Any], size: int) -> Any:
    weight, x = torch.ones(3, requires_grad=True), _make_samples(dist.get_rank())
    value = answer((x @ weight).square().sum(), len(x), dist.group.WORLD)
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise WrongAnswer("The returned loss does not depend on loss_sum: leave out .item().")
    value.backward()
    dist.all_reduce(weight.grad)  # [3]
    return weight.grad / size


@add_trials(
    "my_joined_loss",
    (len(_NUM_SAMPLES),),
    rank_fn=_run_joined_loss,
    success="Right: with 4, 1 and 2 samples on three ranks it is the joined batch's gradient.",
)
def _(size: int) -> Trial:
    def compute_gradient(*weights: float) -> Tensor:
        w = torch.ones(3, requires_grad=True)
        sum(c * (_make_samples(r) @ w).square().sum() for r, c in enumerate(weights)).backward()
        return w.grad

    total = sum(_NUM_SAMPLES)
    mistakes = {
        "It is the average of the ranks' own means: a sample on the rank with the short batch "
        "counts more than the others.": compute_gradient(*(1 / c / size for c in _NUM_SAMPLES)),
        f"It is {size} times too small: DataParallel divides by the number of ranks once more.": (
            compute_gradient(*[1 / total / size] * size)
        ),
    }
    # float32, values up to about 10
    right = compute_gradient(*[1 / total] * size)
    return Trial([Output("the averaged gradient", right, mistakes, 1e-5)], size=size)


def _run_accumulation(answer: Callable[..., Any], size: int, parts: int) -> tuple[Any, ...]:
    rank = dist.get_rank()
    model = DataParallel(_ToyModel(), dist.group.WORLD, bucket_bytes=64, first_bytes=64)
    with count.record_traffic() as sent:
        answer(model, lambda x: model(x, True), [_make_batch(rank, part) for part in range(parts)])
    return model.module.flatten_gradients(), sent.calls["all_reduce"], len(model.buckets)


def _check_bucket_messages(records: list[RankRecord]) -> str:
    sent, buckets = records[0].extras
    if sent <= buckets:
        return ""
    return (
        f"The gradient is right, but rank 0 sent {sent} messages for {buckets} buckets: all "
        "micro-batches but the last belong inside model.no_sync()."
    )


@add_trials(
    "my_accumulate",
    ((2, 3),),
    rank_fn=_run_accumulation,
    rules=[_check_bucket_messages],
    success="Right: the mean over 2 ranks and 3 micro-batches, each bucket sent once.",
)
def _(size: int, parts: int) -> Trial:
    sums = [_compute_local_gradient(rank, True, range(parts)) for rank in range(size)]
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
    return Trial([Output("the gradient", right, mistakes, 1e-6)], size=size)


def _count_micro_batches(
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


add_cases(
    "my_micro_batches",
    # Bytes of gradients, ranks, bytes/s, seconds of a micro-batch's forward and backward, fraction.
    (
        (2e9, 8, 12.5e9, 0.05, 0.10, 0.05),  # sends for 280 ms, 100 hidden: 23 of 150 ms
        (14e9, 64, 25e9, 0.10, 0.20, 0.10),
        (1e9, 4, 50e9, 0.02, 0.04, 0.05),  # all communication is hidden: one micro-batch is enough
    ),
    _count_micro_batches,
    success="Right: the waiting time is constant, and more micro-batches share it.",
    mistakes={
        "Nothing overlaps here, but the last backward hides what it can.": partial(
            _count_micro_batches, hidden=lambda m, backward: 0.0
        ),
        "Every backward hides a part here. Inside no_sync() nothing is sent: only the last "
        "backward hides communication.": partial(
            _count_micro_batches, hidden=lambda m, backward: m * backward
        ),
    },
)
