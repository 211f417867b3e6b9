"""One flat tensor: parameters that are gathered and freed, gradients that go to their owners.

N ranks. A flat tensor is padded to a multiple of N and falls into N equal shards; shard r belongs
to rank r. Equal shards are what collectives want; the padding is less than N elements. When any of
this happens is what ZeRO's stages differ in: see `core`.

1. `Flat`, parameters side by side, and `all_gather`;
2. `ReduceScatter`, one message of gradients to everyone;
3. `Gradients` of a flat tensor, and `Reducer`, the order in which they leave and come in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import ranks
from shardlab.data_parallel.buckets import copy_from_rank_0
from shardlab.ranks.renamed import all_gather_single, reduce_scatter_single

State = Literal["sharded", "gathering", "full"]  # what of the parameters is on this rank


class Flat:
    """Some parameters side by side in one tensor, of which each rank owns a shard.

    full [size]: what the module computes with; its parameters are views into it. shard [size / N]:
    what this rank owns of it, in `master`, the parameters' own dtype. pieces: the shard, cut where
    parameters begin, for the optimizer. `full` may have another dtype, and may be empty: its memory
    is given back and taken again behind the tensor's back (`resize_`), so that what autograd has
    saved for backward points into it, and finds what was gathered last.
    """

    state: State

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        stay: bool,
    ):
        """Own a shard of `parameters`, as they are on rank 0; stay: `full` is there for good."""
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.group, self.dtype = group, dtype
        first = self.parameters[0]  # all are of one kind
        self.master, self.device, self.trainable = first.dtype, first.device, first.requires_grad
        self.shapes = [p.shape for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]
        size = dist.get_world_size(group)
        self.shard_size = -(-sum(self.sizes) // size)  # rounded up
        self.size = self.shard_size * size
        begin = dist.get_rank(group) * self.shard_size
        self.own = slice(begin, begin + self.shard_size)
        wide = self.join([p.detach() for p in self.parameters])
        copy_from_rank_0([wide], group)
        self.full = wide.to(dtype)  # the same tensor where it has that dtype
        self._apart = not stay or self.full is not wide  # the shard has memory of its own
        self.shard = wide[self.own].clone() if self._apart else wide[self.own]
        self.pieces = [nn.Parameter(cut, self.trainable) for cut in self.cut(self.shard)]
        self._views, self._nothing = self.views(self.full), self.full.new_empty(0)
        self.works: list[dist.Work] = []
        self._show("full", self._views)
        if not stay:
            self.free()

    def empty(self, dtype: torch.dtype) -> Tensor:
        """A flat tensor [size] with its padding at zero."""
        flat = torch.empty(self.size, dtype=dtype, device=self.device)
        flat[sum(self.sizes) :] = 0
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` [size], seen as the parameters in their own shapes."""
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def join(self, tensors: Iterable[Tensor]) -> Tensor:
        """A flat tensor [size] of the masters' dtype with `tensors`, one for each parameter."""
        flat = self.empty(self.master)
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            view.copy_(tensor)
        return flat

    def cut(self, shard: Tensor) -> list[Tensor]:
        """This rank's `shard` [size / N], cut where parameters begin: a view for each of them.

        Of a parameter that lies in other ranks' shards altogether it is empty.
        """
        cuts, end = [], 0
        for first, last in self.spans():
            begin, end = end, end + last - first
            cuts.append(shard[begin:end])
        return cuts

    def spans(self) -> list[tuple[int, int]]:
        """Of each parameter, which of its numbers this rank owns: the first, and the end."""
        found, end = [], 0
        for size in self.sizes:
            begin, end = end, end + size
            first, last = (min(max(x - begin, 0), size) for x in (self.own.start, self.own.stop))
            found.append((first, last))
        return found

    @torch.no_grad()
    def gather(self) -> None:
        """Start to fill `full` with all ranks' shards; nobody has parameters until `wait`."""
        self._show("gathering", [self._nothing] * len(self.sizes))
        self.full.untyped_storage().resize_(self.full.nbytes)  # nothing to do where it has stayed
        if self._apart:
            self.full[self.own] = self.shard  # in the dtype of computing
        self.works = [all_gather(self.full, self.own, self.group)]

    def wait(self) -> None:
        """Have the parameters whole, if they are on their way."""
        for work in self.works:
            work.wait()
        if self.state == "gathering":
            self.works = []
            self._show("full", self._views)

    def free(self) -> None:
        """Give the memory of `full` back, after what is under way."""
        self.wait()
        if self.state == "full":
            self._show("sharded", [self._nothing] * len(self.sizes))
            self.full.untyped_storage().resize_(0)

    def _show(self, state: State, tensors: list[Tensor]) -> None:
        self.state = state
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor


def all_gather(flat: Tensor, own: slice, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill `flat` with every rank's shard; this rank's stands in its place already.

    Each rank sends (N-1)/N of the flat tensor's bytes (`collectives.bytes_sent`).
    """
    work = all_gather_single(flat, flat[own], group=group, async_op=True)  # [size / N] to [size]
    assert work is not None
    return work


# Gradients.


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
