"""Data parallelism: every rank holds the whole model and trains it on its own share of the batch.

The gradient of a mean over the joined batch is the mean of the gradients over equal shares of it.
So ranks that start from the same weights and average their gradients stay equal to one another, and
to one process that saw the whole batch. This module averages in three ways, each faster:

1. `average_gradients`: one all-reduce per parameter, after the backward pass;
2. `average_in_buckets`: one all-reduce per bucket of many parameters, after the backward pass;
3. `DataParallel`: the same buckets, each sent while the backward pass still computes the next ones.

All three scale by 1/N first and add up then, as torch's DistributedDataParallel does.
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
from shardlab.common.arguments import check_whole
from shardlab.data_parallel import buckets
from shardlab.data_parallel.buckets import MIB, Backward, copy_from_rank_0


def average_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Step 1: average each gradient over `group`, after backward (Li, section 3.2.1)."""
    ranks.check_trained(module, group)
    buckets.average_gradients(module.parameters(), group)


def assign_buckets(
    parameters: Iterable[nn.Parameter], bucket_bytes: int = 25 * MIB, first_bytes: int = MIB
) -> list[list[nn.Parameter]]:
    """Step 2: deal trainable parameters into buckets, the last first, as its gradient is first.

    The sizes are torch's (Li, section 3.2.2).
    """
    check_whole(bucket_bytes=bucket_bytes, first_bytes=first_bytes)
    trained = [p for p in parameters if p.requires_grad]
    return buckets.deal(reversed(trained), bucket_bytes, first_bytes)


class Bucket:
    """The gradients of some parameters, side by side in one flat tensor: one message.

    Each `parameter.grad` becomes a view into `flat`, so that a gradient is held once, and averaged
    where it lies. `flat` ends with one more element per parameter, which says after the all-reduce
    whether any rank had a gradient for it.
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
        self.expect_all()

    def expect_all(self) -> None:
        """Begin a step: no gradient is in its place yet."""
        self.pending = set(range(len(self.parameters)))

    def place(self, index: int, scale: float) -> None:
        """Put `scale` times a gradient into its place in `flat`."""
        view = self.views[index]
        gradient = self.parameters[index].grad
        if gradient is not view:  # after zero_grad(), autograd makes a new tensor
            torch.mul(gradient, scale, out=view)  # moved and scaled in one pass
            self.parameters[index].grad = view  # and the new tensor is given back
        elif scale != 1:
            view.mul_(scale)

    def launch(self) -> None:
        """Start adding `flat` up over the ranks, and return at once."""
        self.had_gradient.fill_(self.scale)
        self.absent = [i for i in self.pending if self.parameters[i].grad is None]
        for index in self.pending:
            if index in self.absent:
                self.views[index].zero_()  # the last step's gradient still stood there
                self.had_gradient[index] = 0
            else:
                self.place(index, self.scale)
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)  # [numel + params]

    def launch_broken(self) -> None:
        """The same after an error in backward: nan, so that no rank trains with it."""
        self.absent = []
        self.work = dist.all_reduce(self.flat.fill_(math.nan), group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the sum. With nccl it is the GPU's stream that waits, not this process."""
        self.work.wait()
        for index in self.absent:  # seldom any; to read a value, a GPU's work has to be waited for
            if self.had_gradient[index] > 0:  # on another rank
                self.parameters[index].grad = self.views[index]
        self.expect_all()


def average_in_buckets(buckets: Sequence[Bucket]) -> None:
    """Step 2: average all gradients after backward, one message per bucket, all at once."""
    for bucket in buckets:
        bucket.launch()
    for bucket in buckets:
        bucket.wait()


class DataParallel(nn.Module):
    """Step 3: wraps `module` so that gradients are averages over `group` when backward returns.

        model = DataParallel(GPT(config), dist.group.WORLD)
        loss(model(tokens), targets).backward()
        optimizer.step()

    A hook on each parameter puts its gradient into its bucket as soon as autograd has finished it,
    and sends a complete bucket (Li, section 3.2.3). Buckets leave in one fixed order on all ranks,
    whatever order gradients come in: a full bucket waits for those before it.

    Parameters and buffers start as rank 0's; with `broadcast_buffers` its buffers are copied again
    before each forward in training. A parameter without a gradient on this rank takes part with
    zeros; without one on any rank its `grad` stays None, as in one process. Each rank's backward
    has to reach some trainable parameter, or its buckets never leave and the others wait.

    After an error in backward the next forward drops its gradients; on a rank that had no error
    they are nan, if not all had left.

    Left out, but in torch's: buckets dealt anew in the order in which the first gradients came, and
    re-entrant checkpointing (use_reentrant=False works). Left out in both: create_graph=True.

    Raises ValueError for sizes below 1, a group without this rank, a module with sparse gradients
    or nothing to train, and on every rank when the ranks' modules or arguments differ.
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
        check_whole(bucket_bytes=bucket_bytes, first_bytes=first_bytes)
        sizes = {"bucket_bytes": bucket_bytes, "first_bytes": first_bytes}
        ranks.check_model(module, group, **sizes, broadcast_buffers=broadcast_buffers)
        self.module, self.group, self.broadcast_buffers = module, group, broadcast_buffers
        copy_from_rank_0([*module.parameters(), *module.buffers()], group)
        dealt = assign_buckets(module.parameters(), bucket_bytes, first_bytes)
        self.buckets = [Bucket(parameters, group) for parameters in dealt]
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                hook = partial(self._arrived, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)
        self._synchronise, self._backward = True, Backward()
        self._start_over()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self._backward.unfinished:  # an error ended the last one halfway
            self._give_up()
        if self.broadcast_buffers and self.training and self._synchronise:
            copy_from_rank_0(self.module.buffers(), self.group)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds to this rank's own gradients and sends nothing.

        Put all micro-batches of a step inside but the last (Li, section 3.2.4).
        """
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def _start_over(self) -> None:
        self._backward.over()
        self._sent = 0  # buckets under way
        for bucket in self.buckets:
            bucket.expect_all()

    def _give_up(self) -> None:
        """Forget a backward; all ranks send all buckets, so that they stay in step."""
        for bucket in self.buckets[self._sent :]:
            bucket.launch_broken()
        for bucket in self.buckets:
            bucket.work.wait()
            for parameter in bucket.parameters:
                parameter.grad = None
        self._start_over()

    def _arrived(self, bucket: Bucket, index: int, _parameter: torch.Tensor) -> None:
        """Autograd calls this when a gradient is complete, all uses of its parameter added up."""
        self._backward.begins(self._finish if self._synchronise else None)
        if not self._synchronise:
            return bucket.place(index, 1)
        bucket.place(index, bucket.scale)
        bucket.pending.discard(index)
        while self._sent < len(self.buckets) and not self.buckets[self._sent].pending:
            self.buckets[self._sent].launch()
            self._sent += 1

    def _finish(self) -> None:
        """Send what missing gradients have held up, and wait for everything."""
        for bucket in self.buckets[self._sent :]:
            bucket.launch()
        for bucket in self.buckets:
            bucket.wait()
        self._start_over()


def joined_mean(loss_sum: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's loss such that averaged gradients are those of the joined batch's mean.

    loss_sum: the sum of the losses of this rank's `count` samples (or tokens), a scalar. The result
    is loss_sum * N / (count of all ranks): its average over ranks is the joined mean, which the
    average of the ranks' own means is not, unless all counts are equal.
    """
    ranks.check_group(group)
    total = torch.full((), count, device=loss_sum.device)  # made there: a GPU is not waited for
    dist.all_reduce(total, group=group)  # a scalar
    if count == 0 and total == 0:  # to read it, a GPU's work has to be waited for
        raise ValueError("count=0 on every rank: the joined batch needs one sample at least")
    return loss_sum * dist.get_world_size(group) / total


@torch.no_grad()
def drift(module: nn.Module, group: dist.ProcessGroup) -> float:
    """How far any parameter on any rank is from rank 0's: 0.0 while the replicas agree."""
    ranks.check_trained(module, group)
    gaps = []
    for parameter in module.parameters():
        first = parameter.detach().clone()
        copy_from_rank_0([first], group)
        gaps.append((parameter - first).abs().max().float())
    worst = torch.stack(gaps).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)  # a scalar
    return worst.item()


def step_seconds(
    forward: float,
    backward: float,
    sizes: Sequence[int],
    wire: Callable[[int], float],
    overlap: bool = True,
) -> float:
    """Predicted seconds of forward, backward and the buckets' all-reduces.

    sizes: bytes of each bucket. wire: bytes to seconds of one all-reduce; one follows the other.
    Bucket k is ready when backward has gone through the bytes of buckets 0 to k, as even work.
    """
    ready = free = forward
    for size in sizes:
        ready += backward * size / sum(sizes)
        free = max(free, ready if overlap else forward + backward) + wire(size)
    return max(forward + backward, free)
