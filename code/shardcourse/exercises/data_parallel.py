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

    def forward(self, x: Tensor, extra: bool, factor: float = 1.0) -> Tensor:
        y = self.frozen(self.first(x).tanh())  # [batch, 4]
        return (self.last(y) + (factor * self.extra(y) if extra else 0)).square().mean()

    def flatten_gradients(self) -> Tensor:
        """Return all gradients in one flat tensor, with zeros where a parameter has none."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
        )


def _make_batch(rank: int, part: int = 0) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * rank + part))


def _compute_local_gradient(
    rank: int, extra: bool, factor: float = 1.0, parts: Sequence[int] = (0,)
) -> Tensor:
    """Return the gradient that one rank computes alone, summed over its micro-batches."""
    model = _ToyModel()
    for part in parts:
        model(_make_batch(rank, part), extra, factor).backward()
    return model.flatten_gradients()


def _run_average(
    answer: Callable, group: dist.ProcessGroup, size: int, users: Sequence[int], factor: float = 1.0
) -> tuple[Tensor, bool, bool]:
    """Return the gradients, whether some rank used the extra layer, and if it has a gradient now.

    factor: of the extra layer's output; with 0.0 the layer's gradient is exactly zero.
    """
    rank, model = dist.get_rank(), _ToyModel()
    model(_make_batch(rank), rank in users, factor).backward()
    answer(model, group)
    found = any(p.grad is not None for p in model.extra.parameters())
    return model.flatten_gradients(), bool(users), found


def _check_grad_none(records: list[RankRecord]) -> str:
    for used, found in (one.extras for one in records):
        if found and not used:
            return (
                "A layer that no rank used has a gradient of zeros now, and AdamW's weight decay "
                "would move it: its `grad` has to stay None. How does a rank learn that no other "
                "has one?"
            )
        if used and not found:
            return (
                "A layer that a rank used has `grad=None` now, because its gradient is exactly "
                "zero: AdamW moves this layer in one process, so zeros have to stay zeros."
            )
    return ""


@add_trials(
    "my_exact_average",
    ((2, (0, 1)), (4, (0, 1, 2, 3)), (2, (0,)), (2, ()), (2, (0,), 0.0)),
    rank_fn=_run_average,
    rules=[_check_grad_none],
    success="Right: equal to the average on 2 and 4 ranks, with a frozen layer, with one that only "
    "rank 0 used, and None for one that no rank used.",
)
def _(size: int, users: Sequence[int], factor: float = 1.0) -> Trial:
    local = [_compute_local_gradient(rank, rank in users, factor) for rank in range(size)]
    total = torch.stack(local).sum(0)
    by_users = torch.full_like(total, size)
    by_users[-5:] = max(len(users), 1)  # weight and bias of the extra layer
    mistakes = {
        "It is divided by the number of ranks that used the layer. The ranks that did not use it "
        f"have samples, too, with a gradient of zero: divide by {size}.": total / by_users,
        f"It is the sum over the ranks, {size} times the average.": total,
        "Every rank still has its own gradient: nothing was averaged.": local,
    }
    # float32, values up to about 1: the order of four additions may differ
    return Trial([Output("the gradient", total / size, mistakes, 1e-6)], size=size)


_NUM_SAMPLES = (4, 1, 2, 1, 3)
_GROUPS = (0, 1, 2), (3, 4)  # two groups at once: a collective over all ranks mixes them


def _make_samples(rank: int) -> Tensor:
    both = torch.cat([_make_batch(rank), _make_batch(rank, 1)])
    return both[: _NUM_SAMPLES[rank]]  # [samples, 3]


def _run_joined_loss(answer: Callable[..., Any], *_: Any) -> Any:
    group = dist.new_subgroups_by_enumeration(list(map(list, _GROUPS)))[0]
    weight, x = torch.ones(3, requires_grad=True), _make_samples(dist.get_rank())
    value = answer((x @ weight).square().sum(), len(x), group)
    if not isinstance(value, Tensor):
        raise WrongAnswer(
            f"It returned {value!r}, a {type(value).__name__}: backward needs a loss, which is a "
            "tensor computed from loss_sum."
        )
    if not value.requires_grad:
        raise WrongAnswer("The returned loss does not depend on loss_sum: use it as it is.")
    value.backward()
    dist.all_reduce(weight.grad, group=group)  # [3]
    return weight.grad / group.size()


@add_trials(
    "my_joined_loss",
    (len(_NUM_SAMPLES),),
    rank_fn=_run_joined_loss,
    success="Right: in groups of three and of two ranks it is the gradient of the joined batch.",
)
def _(size: int) -> Trial:
    def compute_gradients(weigh: Callable[[int, int, int], float]) -> list[Tensor]:
        """Return each rank's gradient; weigh: of its samples, the group's samples and ranks."""
        found = []
        for members in _GROUPS:
            w, total = torch.ones(3, requires_grad=True), sum(_NUM_SAMPLES[r] for r in members)
            for r in members:
                weight = weigh(_NUM_SAMPLES[r], total, len(members))
                (weight * (_make_samples(r) @ w).square().sum()).backward()
            found += [w.grad] * len(members)
        return found

    mistakes = {
        "It is the average of the ranks' own means: a sample on the rank with the short batch "
        "counts more than the others.": compute_gradients(lambda own, total, n: 1 / own / n),
        "It is too small by the number of ranks: DataParallel divides by it once more.": (
            compute_gradients(lambda own, total, n: 1 / total / n)
        ),
        "It is multiplied by the number of all processes: give dist.get_world_size `group`.": (
            compute_gradients(lambda own, total, n: size / n / total)
        ),
    }
    # float32, values up to about 10
    right = compute_gradients(lambda own, total, n: 1 / total)
    return Trial([Output("the averaged gradient", right, mistakes, 1e-5)], size=size)


def _run_accumulation(
    answer: Callable[..., Any], group: dist.ProcessGroup, size: int, parts: int
) -> tuple[Any, ...]:
    rank, held = dist.get_rank(), [0, 0]  # samples that wait for backward: now, and at most
    model = DataParallel(_ToyModel(), group, bucket_bytes=64, first_bytes=64)
    model.module.last.bias.register_hook(lambda _: held.__setitem__(0, 0))

    def compute_loss(x: Tensor) -> Tensor:
        held[0] += len(x)
        held[1] = max(held)
        return model(x, True)

    with count.record_traffic() as sent:
        answer(model, compute_loss, [_make_batch(rank, part) for part in range(parts)])
    return model.module.flatten_gradients(), sent.calls["all_reduce"], len(model.buckets), held[1]


def _check_accumulation(records: list[RankRecord]) -> str:
    sent, buckets, held = records[0].extras
    if held > len(_make_batch(0)):
        return (
            f"The gradient is right, but the activations of {held} samples were held at once: run "
            "each micro-batch's backward before the next one's forward."
        )
    if sent > buckets:
        return (
            f"The gradient is right, but rank 0 sent {sent} messages for {buckets} buckets: all "
            "micro-batches but the last belong inside model.no_sync()."
        )
    return ""


@add_trials(
    "my_accumulate",
    ((2, 3),),
    rank_fn=_run_accumulation,
    rules=[_check_accumulation],
    success="Right: the mean over 2 ranks and 3 micro-batches, each bucket sent once.",
)
def _(size: int, parts: int) -> Trial:
    sums = [_compute_local_gradient(rank, True, parts=range(parts)) for rank in range(size)]
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
