"""One flat tensor of parameters: what a rank owns of it, and how it is gathered and freed.

N ranks. A flat tensor is padded to a multiple of N and falls into N equal shards; shard r belongs
to rank r. Equal shards are what collectives want; the padding is less than N elements. Its
gradients are `gradients`; when any of this happens is what ZeRO's stages differ in: see `core`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.data_parallel.buckets import copy_from_rank_0
from shardlab.ranks.renamed import all_gather_single

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
