"""Gradients, from autograd's hands to the ranks that own them.

`ReduceScatter` is one message to everyone, `Gradients` what becomes such a message, those of a flat
tensor, and `Reducer` the order in which they leave and come in while backward computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import ranks
from shardlab.ranks.renamed import reduce_scatter_single

from .flat import Flat


class ReduceScatter:
    """Starts to add up all ranks' `flat`; `wait` returns this rank's shard of the sum.

    Ordered: every rank sends shard j straight to rank j, which adds up what it gets, in the order
    of the ranks. It moves as much as any reduce-scatter, (N-1)/N of the bytes, and its sums have
    the same bits as those of one process that goes through the ranks' shares in that order.
    Otherwise the backend's own: the way to go on nccl; gloo's makes an all-reduce, of which each
    rank throws most away.
    """

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, ordered: bool):
        self.flat = flat
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.shards = flat.view(self.size, -1)  # [N, size / N]
        self.works: list[Any] = []
        if not ordered:
            self.sum = torch.empty_like(self.shards[0])
            # [size] to shard
            work = reduce_scatter_single(self.sum, flat, group=group, async_op=True)
            self.works.append(work)
            return
        self.sum = None
        self.received = [torch.empty_like(self.shards[0]) for _ in range(self.size - 1)]
        for step in range(1, self.size):  # to the next rank first: no rank is sent all at once
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            incoming = self.received[source - (source > self.rank)]
            # [size / N] each
            self.works.append(ranks.exchange(self.shards[to], to, incoming, source, group))

    def wait(self, output: Tensor | None = None) -> Tensor:
        """The sum's shard [size / N], in `output`, which may be a part of `flat`, or in its own."""
        for work in self.works:
            work.wait()
        if self.sum is not None:
            return self.sum if output is None else output.copy_(self.sum)
        parts = [*self.received]
        parts.insert(self.rank, self.shards[self.rank])
        total = parts[0]
        if output is None:
            output = torch.empty_like(total)
        for part in parts[1:-1]:
            total = torch.add(total, part, out=self.received[0])
        return torch.add(total, parts[-1], out=output) if self.size > 1 else output.copy_(total)


class Gradients:
    """The gradients of a flat tensor's parameters, and this rank's pieces of their average.

    `place` moves one of them into a flat tensor of their own, `send` starts the reduce-scatter,
    `receive` gives each piece its part of the average. keep (stage 1): the sum is written where
    this rank's shard stood, and the flat tensor stays for as long as the pieces have gradients.
    Otherwise (stages 2 and 3) it is given back, and a shard is left.
    """

    def __init__(self, flat: Flat, keep: bool, ordered: bool):
        self.flat, self.keep, self.ordered = flat, keep, ordered
        self.scale = 1 / dist.get_world_size(flat.group)
        self.sending: ReduceScatter | None = None
        self.forget()

    def forget(self) -> None:
        """Drop what has been collected, and wait for what is under way."""
        if self.sending is not None:
            self.sending.wait()
        for parameter in self.flat.parameters:
            parameter.grad = None
        self.sending = self.collected = self.unsettled = None
        self.placed: set[int] = set()  # numbers of the parameters whose gradients have come

    @torch.no_grad()
    def place(self, index: int) -> None:
        """Move a parameter's gradient, times 1/N, to its place, or add it to what is there."""
        parameter = self.flat.parameters[index]
        gradient, parameter.grad = parameter.grad, None  # here autograd's tensor is given back
        if self.collected is None:
            self._collect()
        view = self.views[index]
        if index in self.placed:
            view.add_(gradient, alpha=self.scale)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, self.scale, out=view)  # moved and scaled in one pass
        else:
            view.copy_(gradient).mul_(self.scale)  # widened before it is scaled
        self.placed.add(index)

    def _collect(self) -> None:
        self.collected = self.flat.empty(self.flat.master)  # [size]
        self.views = self.flat.views(self.collected)

    @torch.no_grad()
    def send(self) -> None:
        """Start the reduce-scatter; a parameter without a gradient takes part with zeros."""
        for index, parameter in enumerate(self.flat.parameters):
            if parameter.grad is not None:
                self.place(index)
        if self.collected is None:
            self._collect()
        # Made where it is needed: a list that is copied to a GPU makes this process wait for it.
        self.had_gradient = torch.ones(len(self.views), dtype=torch.uint8, device=self.flat.device)
        for index, view in enumerate(self.views):
            if index not in self.placed:
                view.zero_()
                self.had_gradient[index].zero_()
        self.sending = ReduceScatter(self.collected, self.flat.group, self.ordered)
        self.collected, self.views = None, []

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the sum. Pieces get their gradients, but for parameters that had none here."""
        if self.sending is None:
            return
        output = self.sending.flat[self.flat.own] if self.keep else None
        shard = self.sending.wait(output)  # [size / N]
        self.sending = None
        self._give(shard, self.placed)
        missing = set(range(len(self.flat.pieces))) - self.placed
        self.unsettled = (shard, missing) if missing else None
        self.placed = set()

    @torch.no_grad()
    def settle(self, had_gradient: Tensor) -> None:
        """Give the others theirs, where any rank had one: `had_gradient` [parameters].

        Reading it waits for a GPU: it happens only where a gradient is missing.
        """
        if self.unsettled is not None:
            shard, missing = self.unsettled
            self._give(shard, {index for index in missing if had_gradient[index] > 0})
            self.unsettled = None

    def _give(self, shard: Tensor, indices: set[int]) -> None:
        for index, (piece, part) in enumerate(
            zip(self.flat.pieces, self.flat.cut(shard), strict=True)
        ):
            if index in indices and piece.numel():
                piece.grad = part if piece.grad is None else piece.grad.add_(part)


class Reducer:
    """Sends `gradients` over the group during a backward, in the order in which it is told to.

    One reduce-scatter is under way at a time, so that only one takes memory.
    """

    def __init__(self, gradients: Sequence[Gradients], group: dist.ProcessGroup):
        self.gradients, self.group = gradients, group
        self.sent: list[Gradients] = []  # in this backward; all but the last are received

    def send(self, gradients: Gradients) -> None:
        """Start a reduce-scatter, when the one before is through."""
        self.receive()
        gradients.send()
        self.sent.append(gradients)

    def receive(self) -> None:
        """Wait for the reduce-scatter that is under way, if there is one."""
        if self.sent:
            self.sent[-1].receive()

    def finish(self) -> None:
        """When backward is over: wait for the last one, and settle what is to have no gradient."""
        if self.sent:
            # [trainable parameters]: did any rank have a gradient? Otherwise it is to stay None.
            had_gradient = torch.cat([g.had_gradient for g in self.sent])
            work = dist.all_reduce(had_gradient, dist.ReduceOp.MAX, self.group, async_op=True)
            self.receive()
            work.wait()
            parts = had_gradient.split([len(g.had_gradient) for g in self.sent])
            for gradients, part in zip(self.sent, parts, strict=True):
                gradients.settle(part)
        self.sent = []

    def forget(self) -> None:
        """Drop a backward that an error has ended halfway."""
        for gradients in self.gradients:
            gradients.forget()
        self.sent = []
