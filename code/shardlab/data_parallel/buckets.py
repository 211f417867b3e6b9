"""Operations on parameters and gradients that data parallelism, ZeRO and others share.

`copy_from_rank_0` makes all ranks start equal, `average_gradients` is data parallelism in one call,
without buckets or overlap, and `clip_by_global_norm` clips gradients that are sharded over ranks.

Li: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardlab.common.arguments import check_number
from shardlab.ranks import check_group, check_same_once

MIB = 2**20
TensorT = TypeVar("TensorT", bound=torch.Tensor)


def split_into_buckets(
    parameters: Iterable[TensorT],
    bucket_bytes: float = math.inf,
    first_bytes: float = math.inf,
) -> list[list[TensorT]]:
    """Divide parameters, or gradients, into buckets, in the given order (Li, section 3.2.2).

    A bucket is full once it holds `bucket_bytes`; the first bucket, which is sent first, already at
    `first_bytes`. A bucket's tensors have one dtype, one device and one value of `requires_grad`.
    """
    full: list[list[TensorT]] = []
    filling: dict[Any, list[TensorT]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, parameter.requires_grad)
        bucket = filling.setdefault(kind, [])
        bucket.append(parameter)
        if sum(p.nbytes for p in bucket) >= (bucket_bytes if full else first_bytes):
            full.append(filling.pop(kind))
    return full + list(filling.values())


@torch.no_grad()
def copy_from_rank_0(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors` with those of rank 0 of `group` (not of the world)."""
    check_group(group)
    root = dist.get_global_rank(group, 0)
    works = [dist.broadcast(t.detach(), root, group=group, async_op=True) for t in tensors]
    for work in works:
        work.wait()


@torch.no_grad()
def average_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, coalesce: bool = False
) -> None:
    """Average each gradient over `group`, in place, after backward.

    coalesce: see `all_reduce_gradients`. A rank without a gradient contributes zeros, because the
    other ranks wait for it. Gradients are scaled by 1/N before the sum.
    """
    _, size = check_group(group)
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    all_reduce_gradients([p.grad for p in trained], group, coalesce, scale=1 / size)


@torch.no_grad()
def all_reduce_gradients(
    gradients: Iterable[torch.Tensor],
    group: dist.ProcessGroup,
    coalesce: bool = False,
    scale: float = 1.0,
) -> None:
    """Scale each gradient by `scale` and all-reduce the sum over `group`, in place.

    All gradients are sent at once, one message each. coalesce: send one message per dtype
    instead, with a flat copy of the gradients, which one kernel scales.
    """
    check_group(group)
    sums = []
    for bucket in split_into_buckets(gradients) if coalesce else [[g] for g in gradients]:
        flat = torch.cat([g.flatten() for g in bucket]) if coalesce else bucket[0]
        if scale != 1.0:
            flat *= scale
        sums.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in sums:
        work.wait()
        if coalesce:
            totals = flat.split([g.numel() for g in bucket])
            for gradient, total in zip(bucket, totals, strict=True):
                gradient.copy_(total.view_as(gradient))


def is_in_backward() -> bool:
    """Return True during autograd's backward: a forward is then a recomputation (torch's test)."""
    return torch._C._current_graph_task_id() != -1


class BackwardTracker:
    """A tracker of one backward pass: its start, its end, and an interruption by an error.

    Every gradient hook calls `mark_started` with a callback, which runs at the end of this
    backward, just before backward() returns: only then is it certain that a missing gradient will
    not come. The callback must call `mark_ended`. After an error in backward the callback does not
    run; until `mark_ended` is called, the backward `is_unfinished` and no other one can begin.
    """

    def __init__(self) -> None:
        self._number: int | None = None  # autograd's number of the current backward

    @property
    def is_unfinished(self) -> bool:
        """True if a backward began and did not end; during a forward: an error interrupted it."""
        return self._number is not None

    def mark_started(self, on_end: Callable[[], None] | None) -> None:
        """Record that a backward runs, and call `on_end` at its end; None: only check.

        Raises RuntimeError if an error ended the last backward and no forward came in between.
        """
        number = torch._C._current_graph_task_id()  # not public; torch's own code uses it
        if self._number not in (None, number):
            raise RuntimeError(
                "an error ended the last backward: run a forward before the next one"
            )
        if self._number is None and on_end is not None:
            self._number = number
            # Not public either, but torch's DDP and FSDP2 depend on it too.
            torch.autograd.Variable._execution_engine.queue_callback(on_end)

    def mark_ended(self) -> None:
        """Allow the next backward to begin."""
        self._number = None


@torch.no_grad()
def clip_by_global_norm(
    owner: Any,
    limit: float,
    groups: Sequence[dist.ProcessGroup],
    parts: Iterable[nn.Parameter],
    replicated: Iterable[nn.Parameter] = (),
    copies: Iterable[nn.Parameter] = (),
    same_norm_groups: Sequence[dist.ProcessGroup] = (),
) -> torch.Tensor:
    """Clip gradients to a global norm over all ranks of at most `limit`; return the norm before.

    Every gradient element counts once. parts: parameters that are sharded over `groups`, or that
    only this rank counts; their squares are summed over these groups. replicated: parameters that
    all ranks of the groups have. copies: parameters that another rank counts; they are only scaled.
    same_norm_groups: their ranks all compute the same norm. A gradient of None counts as zeros.

    Norms are at least float32: 16 bits would keep two or three digits. Raises ValueError for a
    limit below 0, and on every rank if the limits of the first call for `owner` differ.
    """
    check_number(0, math.inf, limit=limit)
    check_same_once(owner, "clip", *groups, *same_norm_groups, limit=float(limit))
    parts, replicated, copies = list(parts), list(replicated), list(copies)
    everything = parts + replicated + copies
    wide = reduce(torch.promote_types, (p.dtype for p in everything), torch.float32)

    def sum_squares(parameters: list[nn.Parameter]) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=everything[0].device)
        norms = [torch.linalg.vector_norm(gradient, dtype=wide) for gradient in gradients]
        return torch.stack(norms).double().square().sum()

    total = sum_squares(parts)
    for group in groups:
        dist.all_reduce(total, group=group)  # one number
    norm = (total + sum_squares(replicated)).sqrt().to(wide)
    nn.utils.clip_grads_with_norm_(everything, limit, norm)
    return norm
