"""Parameters side by side in one flat tensor, and the two collectives that work on it.

N ranks, P elements. Whatever is sharded here is cut the same way: the flat tensor, padded to a
multiple of N, falls into N equal shards, and shard r belongs to rank r. Equal shards are what the
collectives want; the padding is less than N elements for each flat tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import ranks
from shardlab.ranks.renamed import all_gather_single, reduce_scatter_single


class Flat:
    """Where each of some parameters stands in a flat tensor, and which part of it this rank owns.

    parameters: by name, of one dtype on one device. dtype: in which the module computes. `master`
    is the parameters' own dtype, in which they are trained. `full` is the tensor that the module
    computes with, `shard` what this rank trains of it, `pieces` the shard's parts as parameters.
    """

    full: Tensor
    shard: Tensor
    pieces: list[nn.Parameter]

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype
    ):
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.group, self.dtype = group, dtype
        self.master, self.device = self.parameters[0].dtype, self.parameters[0].device
        self.trainable = self.parameters[0].requires_grad
        self.shapes = [p.shape for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]
        size = dist.get_world_size(group)
        self.shard_size = -(-sum(self.sizes) // size)  # rounded up
        self.size = self.shard_size * size
        begin = dist.get_rank(group) * self.shard_size
        self.own = slice(begin, begin + self.shard_size)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """A flat tensor [size] with its padding at zero."""
        flat = torch.empty(self.size, dtype=dtype, device=self.device)
        flat[sum(self.sizes) :] = 0
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` [size], seen as the parameters in their own shapes."""
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def cut(self, shard: Tensor) -> list[Tensor]:
        """This rank's `shard` [shard_size], cut where parameters begin: one view each, or nothing.

        A parameter that lies in other ranks' shards altogether has an empty piece here.
        """
        cuts, end = [], 0
        for size in self.sizes:
            begin, end = end, end + size
            low, high = (min(max(x - self.own.start, 0), self.shard_size) for x in (begin, end))
            cuts.append(shard[low:high])
        return cuts

    def train(self, shard: Tensor) -> None:
        """Make `shard` [shard_size] what this rank trains: its pieces become parameters."""
        self.shard = shard
        self.pieces = [nn.Parameter(cut, self.trainable) for cut in self.cut(shard)]

    def serve(self, full: Tensor) -> None:
        """Make `full` [size] what the module computes with."""
        self.full, self._views = full, self.views(full)
        self._nothing = full.new_empty(0)
        self.show()

    def show(self) -> None:
        """Let the module's parameters be views into `full`."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def hide(self) -> None:
        """Let them have no elements, so that nobody computes with what is not there."""
        for parameter in self.parameters:
            parameter.data = self._nothing

    @torch.no_grad()
    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """A flat tensor [size] of the masters' dtype with `tensors`, one for each parameter."""
        flat = self.empty(self.master)
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            view.copy_(tensor)
        return flat

    @torch.no_grad()
    def whole(self) -> list[Tensor]:
        """Every parameter in full, in the masters' dtype, put together from all ranks' shards."""
        flat = self.empty(self.master)
        flat[self.own] = self.shard
        all_gather(flat, self.own, self.group).wait()
        return [view.clone() for view in self.views(flat)]


def deal(
    parameters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup,
    compute_dtype: torch.dtype | None,
    limits: tuple[float, float] = (math.inf, math.inf),
) -> list[Flat]:
    """Deal parameters into flat tensors, in order: trained or frozen, of one dtype, on one device.

    limits: bytes of masters from which a flat tensor is full: the first one, and all others.
    """
    full: list[dict[str, nn.Parameter]] = []
    filling: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        kind = parameter.dtype, parameter.device, parameter.requires_grad
        bucket = filling.setdefault(kind, {})
        bucket[name] = parameter
        if sum(p.nbytes for p in bucket.values()) >= limits[bool(full)]:
            full.append(filling.pop(kind))
    return [
        Flat(bucket, group, compute_dtype or next(iter(bucket.values())).dtype)
        for bucket in full + list(filling.values())
    ]


def all_gather(flat: Tensor, own: slice, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill `flat` with every rank's shard; this rank's stands in its place already.

    Each rank sends (N-1)/N of the flat tensor's bytes (`collectives.bytes_sent`).
    """
    work = all_gather_single(flat, flat[own], group=group, async_op=True)  # [size / N] to [size]
    assert work is not None
    return work


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
