"""Data parallelism: every rank holds the whole model and trains it on its own share of the batch.

The gradient of a mean over the joined batch is the mean of the gradients over equal shares of it.
So ranks that start from the same weights and average their gradients stay equal to one another, and
to one process that trains on the whole batch. This module averages in three ways, each faster:

1. `average_gradients`: one all-reduce per parameter, after the backward pass;
2. `average_in_buckets`: one all-reduce per bucket of many parameters, after the backward pass;
3. `DataParallel`: the same buckets, each all-reduced while the backward pass computes the next.

All three scale by 1/N before the sum, as torch's DistributedDataParallel does.
Li: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlab import ranks
from shardlab.common.arguments import check_integer
from shardlab.data_parallel import buckets
from shardlab.data_parallel.buckets import MIB, BackwardTracker, copy_from_rank_0


def average_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Step 1: average each gradient over `group`, after backward (Li, section 3.2.1)."""
    ranks.check_trainable(module, group)
    buckets.average_gradients(module.parameters(), group)


def assign_buckets(
    parameters: Iterable[nn.Parameter], bucket_bytes: int = 25 * MIB, first_bytes: int = MIB
) -> list[list[nn.Parameter]]:
    """Step 2: divide trainable parameters into buckets, in the order of their gradients.

    Backward computes the last parameter's gradient first. Default sizes: Li, section 3.2.2.
    """
    check_integer(bucket_bytes=bucket_bytes, first_bytes=first_bytes)
    trained = [p for p in parameters if p.requires_grad]
    return buckets.split_into_buckets(reversed(trained), bucket_bytes, first_bytes)


class Bucket:
    """The gradients of some parameters in one flat tensor, averaged by one all-reduce.

    Each `parameter.grad` becomes a view into `flat`, so every gradient is stored once and averaged
    in place. `flat` ends with one more element per parameter, which is positive after the
    all-reduce if any rank had a gradient for that parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup):
        ranks.check_group(group)
        self.parameters = parameters
        self.group = group
        self.scale = 1 / dist.get_world_size(group)
        sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].detach().new_zeros(sum(sizes) + len(sizes))
        *pieces, self.had_gradient = self.flat.split([*sizes, len(sizes)])
        self.views = [v.view(p.shape) for v, p in zip(pieces, parameters, strict=True)]
        self.mark_all_pending()

    def mark_all_pending(self) -> None:
        """Mark all gradients as pending, before a new step."""
        self.pending = set(range(len(self.parameters)))

    def copy_gradient(self, index: int, scale: float) -> None:
        """Copy `scale` times the gradient of parameter `index` into its view of `flat`."""
        view = self.views[index]
        gradient = self.parameters[index].grad
        if gradient is not view:  # after zero_grad(), autograd makes a new tensor
            torch.mul(gradient, scale, out=view)  # copy and scale in one pass
            self.parameters[index].grad = view  # frees the new tensor
        elif scale != 1:
            view.mul_(scale)

    def start_all_reduce(self) -> None:
        """Start the all-reduce of `flat`, without waiting for its end."""
        self.had_gradient.fill_(self.scale)
        self.missing = [i for i in self.pending if self.parameters[i].grad is None]
        for index in self.pending:
            if index in self.missing:
                self.views[index].zero_()  # it still held the previous step's gradient
                self.had_gradient[index] = 0
            else:
                self.copy_gradient(index, self.scale)
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)  # [numel + params]

    def start_nan_all_reduce(self) -> None:
        """Start an all-reduce of nan after an error in backward: no rank must train with it."""
        self.missing = []
        self.work = dist.all_reduce(self.flat.fill_(math.nan), group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the all-reduce. With NCCL the GPU's stream waits, not this process."""
        self.work.wait()
        for index in self.missing:  # usually empty; the comparison below synchronizes with the GPU
            if self.had_gradient[index] > 0:  # another rank had a gradient
                self.parameters[index].grad = self.views[index]
        self.mark_all_pending()


def average_in_buckets(buckets: Sequence[Bucket]) -> None:
    """Step 2: average all gradients after backward, with one asynchronous all-reduce a bucket."""
    for bucket in buckets:
        bucket.start_all_reduce()
    for bucket in buckets:
        bucket.wait()


class DataParallel(nn.Module):
    """Step 3: wrapper of `module` that averages gradients over `group` during backward.

        model = DataParallel(GPT(config), dist.group.WORLD)
        loss(model(tokens), targets).backward()
        optimizer.step()

    A hook on each parameter copies its gradient into a bucket as soon as autograd has finished the
    gradient, and starts the all-reduce of a full bucket (Li, section 3.2.3). All ranks send buckets
    in one fixed order, whatever the order of the gradients: a full bucket waits for earlier ones.

    Parameters and buffers are initialized from rank 0; with `broadcast_buffers`, rank 0's buffers
    are copied again before each forward in training. A parameter without a gradient on this rank
    contributes zeros; without one on any rank its `grad` stays None, as in one process. Each rank's
    backward must reach a trainable parameter, or its buckets are never sent and the others hang.

    After an error in backward, the next forward discards this rank's gradients. On ranks without
    the error, gradients in buckets that the failed rank had not sent become nan.

    Not supported, although torch supports them: rebuilding buckets in the order of the first
    gradients, and use_reentrant=True checkpointing. Neither supports create_graph=True.

    Raises ValueError for sizes below 1, a group without this rank, a module with sparse gradients
    or without trainable parameters, and on every rank if modules or arguments differ.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = 25 * MIB,
        first_bytes: int = MIB,
        broadcast_buffers: bool = True,
    ):
        super().__init__()
        check_integer(bucket_bytes=bucket_bytes, first_bytes=first_bytes)
        sizes = {"bucket_bytes": bucket_bytes, "first_bytes": first_bytes}
        ranks.check_model(module, group, **sizes, broadcast_buffers=broadcast_buffers)
        self.module, self.group, self.broadcast_buffers = module, group, broadcast_buffers
        copy_from_rank_0([*module.parameters(), *module.buffers()], group)
        assigned = assign_buckets(module.parameters(), bucket_bytes, first_bytes)
        self.buckets = [Bucket(parameters, group) for parameters in assigned]
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                hook = partial(self._on_grad_ready, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)
        self._require_sync, self._backward = True, BackwardTracker()
        self._reset_backward_state()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        if self._backward.is_unfinished:  # an error interrupted the last backward
            self._discard_backward()
        if self.broadcast_buffers and self.training and self._require_sync:
            copy_from_rank_0(self.module.buffers(), self.group)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate local gradients inside this context, without communication.

        Run all micro-batches of a step but the last one inside (Li, section 3.2.4).
        """
        before, self._require_sync = self._require_sync, False
        try:
            yield
        finally:
            self._require_sync = before

    def _reset_backward_state(self) -> None:
        self._backward.mark_ended()
        self._sent = 0  # number of buckets whose all-reduce has started
        for bucket in self.buckets:
            bucket.mark_all_pending()

    def _discard_backward(self) -> None:
        """Discard a failed backward: send the missing buckets as nan, so that no rank hangs."""
        for bucket in self.buckets[self._sent :]:
            bucket.start_nan_all_reduce()
        for bucket in self.buckets:
            bucket.work.wait()
            for parameter in bucket.parameters:
                parameter.grad = None
        self._reset_backward_state()

    def _on_grad_ready(self, bucket: Bucket, index: int, _parameter: torch.Tensor) -> None:
        """Copy a complete gradient into its bucket; send buckets that are full (autograd hook)."""
        self._backward.mark_started(self._finalize_backward if self._require_sync else None)
        if not self._require_sync:
            return bucket.copy_gradient(index, 1)
        bucket.copy_gradient(index, bucket.scale)
        bucket.pending.discard(index)
        while self._sent < len(self.buckets) and not self.buckets[self._sent].pending:
            self.buckets[self._sent].start_all_reduce()
            self._sent += 1

    def _finalize_backward(self) -> None:
        """Send the buckets that missing gradients have delayed, and wait for all buckets."""
        for bucket in self.buckets[self._sent :]:
            bucket.start_all_reduce()
        for bucket in self.buckets:
            bucket.wait()
        self._reset_backward_state()


def scale_for_global_mean(
    loss_sum: torch.Tensor, count: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Scale a loss so that its gradients, averaged over ranks, are the joined batch's.

    loss_sum: the sum of the losses of this rank's `count` samples (or tokens), a scalar. The result
    is loss_sum * N / (sum of all ranks' counts). Its average over ranks is the mean over the joined
    batch. The average of the ranks' own means is not, unless all counts are equal.
    """
    ranks.check_group(group)
    total = torch.full((), count, device=loss_sum.device)  # created there: no synchronization
    dist.all_reduce(total, group=group)  # a scalar
    if count == 0 and total == 0:  # `total` is read, which synchronizes, only if count is 0
        raise ValueError("count=0: must be at least 1 on one of the ranks")
    return loss_sum * dist.get_world_size(group) / total


@torch.no_grad()
def measure_drift(module: nn.Module, group: dist.ProcessGroup) -> float:
    """Return the largest parameter difference between a rank and rank 0: 0.0 if all are equal."""
    ranks.check_trainable(module, group)
    gaps = []
    for parameter in module.parameters():
        first = parameter.detach().clone()
        copy_from_rank_0([first], group)
        gaps.append((parameter - first).abs().max().float())
    worst = torch.stack(gaps).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)  # a scalar
    return worst.item()


def predict_step_seconds(
    forward: float,
    backward: float,
    sizes: Sequence[int],
    all_reduce_seconds: Callable[[int], float],
    overlap: bool = True,
) -> float:
    """Return the predicted seconds of forward, backward and the buckets' all-reduces.

    sizes: bytes of each bucket. all_reduce_seconds: maps bytes to the seconds of an all-reduce;
    all-reduces run one after another.
    Bucket k is ready after backward's share for buckets 0 to k, in proportion to their bytes.
    """
    ready = free = forward
    for size in sizes:
        ready += backward * size / sum(sizes)
        free = max(free, ready if overlap else forward + backward) + all_reduce_seconds(size)
    return max(forward + backward, free)
