"""What data parallelism, ZeRO and others do alike with parameters and gradients over a group.

`deal` puts parameters into buckets, `copy_from_rank_0` lets all ranks start equal, `Backward` tells
when autograd's backward pass begins and ends, `average_gradients` is data parallelism in one call,
for those who need no more, and `clip_by_joint_norm` clips what lies on many ranks.

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
Like = TypeVar("Like", bound=torch.Tensor)


def deal(
    parameters: Iterable[Like],
    bucket_bytes: float = math.inf,
    first_bytes: float = math.inf,
) -> list[list[Like]]:
    """Deal parameters, or their gradients, into buckets, in their order (Li, section 3.2.2).

    A bucket is full once it holds `bucket_bytes`; the first, with which sending begins, already at
    `first_bytes`. It holds one dtype on one device, and is trained or frozen as a whole.
    """
    full: list[list[Like]] = []
    filling: dict[Any, list[Like]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, parameter.requires_grad)
        bucket = filling.setdefault(kind, [])
        bucket.append(parameter)
        if sum(p.nbytes for p in bucket) >= (bucket_bytes if full else first_bytes):
            full.append(filling.pop(kind))
    return full + list(filling.values())


@torch.no_grad()
def copy_from_rank_0(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors` with those of the group's rank 0, which is another one in the world."""
    check_group(group)
    root = dist.get_global_rank(group, 0)
    works = [dist.broadcast(t.detach(), root, group=group, async_op=True) for t in tensors]
    for work in works:
        work.wait()


@torch.no_grad()
def average_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, joined: bool = False
) -> None:
    """After backward: make each gradient its average over `group`, in place.

    joined: see `add_up`. A rank without a gradient takes part with zeros: the others wait. Each is
    scaled by 1/N first and added up then.
    """
    _, size = check_group(group)
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    add_up([p.grad for p in trained], group, joined, scale=1 / size)


@torch.no_grad()
def add_up(
    gradients: Iterable[torch.Tensor],
    group: dist.ProcessGroup,
    joined: bool = False,
    scale: float = 1.0,
) -> None:
    """Make each of `gradients`, times `scale`, its sum over `group`, in place.

    One message for each, all under way at once. joined: one for each dtype instead, in which the
    gradients stand side by side, as a copy, and are scaled by one kernel.
    """
    check_group(group)
    sums = []
    for bucket in deal(gradients) if joined else [[g] for g in gradients]:
        flat = torch.cat([g.flatten() for g in bucket]) if joined else bucket[0]
        if scale != 1.0:
            flat *= scale
        sums.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in sums:
        work.wait()
        if joined:
            totals = flat.split([g.numel() for g in bucket])
            for gradient, total in zip(bucket, totals, strict=True):
                gradient.copy_(total.view_as(gradient))


def in_backward() -> bool:
    """Whether autograd is at work: a forward is then a recomputation. torch's own code asks so."""
    return torch._C._current_graph_task_id() != -1


class Backward:
    """One backward pass at a time: when it begins, when it is over, and whether it broke off.

    Every hook on a gradient calls `begins`. What `begins` is given is called when this backward is
    over, just before backward() returns: the first moment at which a gradient that has not come is
    known not to come. It calls `over`. After an error in backward nobody is called; until `over`
    is, the backward is `unfinished`, and no other one can begin.
    """

    def __init__(self) -> None:
        self._number: int | None = None  # autograd's, of the backward that is under way

    @property
    def unfinished(self) -> bool:
        """Whether a backward has begun and is not over; at a forward: that an error ended it."""
        return self._number is not None

    def begins(self, finish: Callable[[], None] | None) -> None:
        """Note that a backward is under way, and have `finish` called at its end; None: only look.

        RuntimeError for a backward after one that an error ended, without a forward in between.
        """
        number = torch._C._current_graph_task_id()  # not public; torch's own code asks so
        if self._number not in (None, number):
            raise RuntimeError("an error ended the last backward: a forward has to come first")
        if self._number is None and finish is not None:
            self._number = number
            # Not public either, but torch's DDP and FSDP2 stand on it too.
            torch.autograd.Variable._execution_engine.queue_callback(finish)

    def over(self) -> None:
        """The next backward may begin."""
        self._number = None


@torch.no_grad()
def clip_by_joint_norm(
    owner: Any,
    limit: float,
    groups: Sequence[dist.ProcessGroup],
    parts: Iterable[nn.Parameter],
    replicated: Iterable[nn.Parameter] = (),
    copies: Iterable[nn.Parameter] = (),
    alike: Sequence[dist.ProcessGroup] = (),
) -> torch.Tensor:
    """Scale gradients down to a joint norm of `limit`, where it is larger; return the norm before.

    Every number counts once. parts: parameters of which each rank of `groups` has its own part, or
    which it alone counts; their squares are added up over these groups. replicated: those all ranks
    of them have. copies: those that another rank counts; they are only scaled. alike: groups whose
    ranks all find the same norm. A gradient of None is zeros.

    Norms are in float32 at least: 16 bits would keep two or three digits of them. Raises ValueError
    for a limit below 0, and on every rank when the limits of the first call for `owner` differ.
    """
    check_number(0, math.inf, limit=limit)
    check_same_once(owner, "clip", *groups, *alike, limit=float(limit))
    parts, replicated, copies = list(parts), list(replicated), list(copies)
    everything = parts + replicated + copies
    wide = reduce(torch.promote_types, (p.dtype for p in everything), torch.float32)

    def squares(parameters: list[nn.Parameter]) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=everything[0].device)
        norms = [torch.linalg.vector_norm(gradient, dtype=wide) for gradient in gradients]
        return torch.stack(norms).double().square().sum()

    total = squares(parts)
    for group in groups:
        dist.all_reduce(total, group=group)  # one number
    norm = (total + squares(replicated)).sqrt().to(wide)
    nn.utils.clip_grads_with_norm_(everything, limit, norm)
    return norm
