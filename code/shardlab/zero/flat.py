"""Flat tensors: parameters that are gathered and freed, gradients that are reduce-scattered.

N ranks. A flat tensor is padded to a multiple of N and split into N equal shards, because
collectives need equal shards; the padding is less than N elements. Shard r belongs to rank r. The
ZeRO stages in `core` differ in when they gather and send.

1. `FlatParams`, parameters in one flat tensor, and `all_gather`;
2. `ReduceScatter`, one message of gradients to all ranks;
3. `FlatGrads` of a flat tensor, and `Reducer`, which sends and receives them in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import ranks
from shardlab.data_parallel.buckets import copy_from_rank_0
from shardlab.ranks.torch_compat import all_gather_single, reduce_scatter_single

State = Literal["sharded", "gathering", "full"]  # the state of the parameters on this rank


class FlatParams:
    """Parameters in one flat tensor, of which each rank owns a shard.

    full [size]: the tensor for computing; the module's parameters are views into it. shard [size /
    N]: this rank's elements, in `master_dtype`, the parameters' original dtype. pieces: the shard,
    split at parameter boundaries, for the optimizer. `full` may have another dtype, or be empty:
    `resize_` frees and reallocates its storage in place, so tensors that autograd saved for
    backward point into it and see the values that were gathered last.
    """

    state: State

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        keep_full: bool,
    ):
        """Shard `parameters` as they are on rank 0; keep_full: never free `full`."""
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.group, self.dtype = group, dtype
        first = self.parameters[0]  # all have the same dtype, device and requires_grad
        self.master_dtype, self.device = first.dtype, first.device
        self.trainable = first.requires_grad
        self.shapes = [p.shape for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]
        size = dist.get_world_size(group)
        self.shard_size = -(-sum(self.sizes) // size)  # rounded up
        self.size = self.shard_size * size
        begin = dist.get_rank(group) * self.shard_size
        self.shard_slice = slice(begin, begin + self.shard_size)
        wide = self.flatten_tensors([p.detach() for p in self.parameters])
        copy_from_rank_0([wide], group)
        self.full = wide.to(dtype)  # the same tensor if it has that dtype already
        self._shard_is_copy = not keep_full or self.full is not wide  # the shard has its own memory
        shard = wide[self.shard_slice]
        self.shard = shard.clone() if self._shard_is_copy else shard
        self.pieces = [nn.Parameter(cut, self.trainable) for cut in self.split_shard(self.shard)]
        self._views, self._empty = self.view_as_params(self.full), self.full.new_empty(0)
        self.works: list[dist.Work] = []
        self._set_parameters("full", self._views)
        if not keep_full:
            self.free_full()

    def new_empty(self, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised flat tensor [size] whose padding is zero."""
        flat = torch.empty(self.size, dtype=dtype, device=self.device)
        flat[sum(self.sizes) :] = 0
        return flat

    def view_as_params(self, flat: Tensor) -> list[Tensor]:
        """Return views of `flat` [size] in the shapes of the parameters."""
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def flatten_tensors(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return a flat tensor [size] of dtype `master_dtype` with `tensors`, one per parameter."""
        flat = self.new_empty(self.master_dtype)
        for view, tensor in zip(self.view_as_params(flat), tensors, strict=True):
            view.copy_(tensor)
        return flat

    def split_shard(self, shard: Tensor) -> list[Tensor]:
        """Split this rank's `shard` [size / N] at parameter boundaries, into views.

        The view of a parameter that lies in other ranks' shards is empty.
        """
        cuts, end = [], 0
        for first, last in self.list_owned_ranges():
            begin, end = end, end + last - first
            cuts.append(shard[begin:end])
        return cuts

    def list_owned_ranges(self) -> list[tuple[int, int]]:
        """Return the range (first, end) of each parameter's elements that this rank owns."""
        found, end, own = [], 0, self.shard_slice
        for size in self.sizes:
            begin, end = end, end + size
            first, last = (min(max(x - begin, 0), size) for x in (own.start, own.stop))
            found.append((first, last))
        return found

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start to all-gather the shards into `full`; no parameters until `wait`."""
        self._set_parameters("gathering", [self._empty] * len(self.sizes))
        self.full.untyped_storage().resize_(self.full.nbytes)  # no effect if `full` was never freed
        if self._shard_is_copy:
            self.full[self.shard_slice] = self.shard  # converted to the dtype for computing
        self.works = [all_gather(self.full, self.shard_slice, self.group)]

    def wait(self) -> None:
        """Wait for a gather that has started, and show the parameters."""
        for work in self.works:
            work.wait()
        if self.state == "gathering":
            self.works = []
            self._set_parameters("full", self._views)

    def free_full(self) -> None:
        """Finish a gather that has started, and free the memory of `full`."""
        self.wait()
        if self.state == "full":
            self._set_parameters("sharded", [self._empty] * len(self.sizes))
            self.full.untyped_storage().resize_(0)

    def _set_parameters(self, state: State, tensors: list[Tensor]) -> None:
        self.state = state
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor


def all_gather(flat: Tensor, shard_slice: slice, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill `flat` with every rank's shard; this rank's is already in place.

    Each rank sends (N-1)/N of the flat tensor's bytes (`collectives.count_bytes_sent`).
    """
    own = flat[shard_slice]  # [size / N], gathered into [size]
    work = all_gather_single(flat, own, group=group, async_op=True)
    assert work is not None
    return work


# Gradients.


class ReduceScatter:
    """An asynchronous sum of all ranks' `flat`; `wait` returns this rank's shard.

    ordered: every rank sends shard j directly to rank j, which adds up what it receives in rank
    order. This moves as many bytes as any reduce-scatter, (N-1)/N, and the sums are bitwise those
    of one process that adds the ranks' shares in that order. Otherwise the backend's
    reduce-scatter: the right choice on nccl; gloo's is an all-reduce of which each rank drops most.
    """

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, ordered: bool):
        self.flat = flat
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.shards = flat.view(self.size, -1)  # [N, size / N]
        self.works: list[Any] = []
        if not ordered:
            self.sum = torch.empty_like(self.shards[0])
            # [size] to [size / N]
            work = reduce_scatter_single(self.sum, flat, group=group, async_op=True)
            self.works.append(work)
            return
        self.sum = None
        self.received = [torch.empty_like(self.shards[0]) for _ in range(self.size - 1)]
        for step in range(1, self.size):  # the next rank first: no rank gets all at once
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            incoming = self.received[source - (source > self.rank)]
            # [size / N] each
            self.works.append(ranks.exchange(self.shards[to], to, incoming, source, group))

    def wait(self, output: Tensor | None = None) -> Tensor:
        """Return the sum's shard [size / N]: `output` (may be part of `flat`) if given."""
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


class FlatGrads:
    """The gradients of a flat tensor's parameters, and of this rank's pieces.

    `add_gradient` moves a parameter's gradient into a flat buffer, `start_reduce_scatter` sends the
    buffer, `finish_reduce_scatter` gives each piece its part of the average. keep_full (stage 1):
    the sum overwrites this rank's shard of the buffer, which lives as long as the pieces'
    gradients. Otherwise (stages 2 and 3) the buffer is freed and only the shard stays.
    """

    def __init__(self, flat: FlatParams, keep_full: bool, ordered: bool):
        self.flat, self.keep_full, self.ordered = flat, keep_full, ordered
        self.scale = 1 / dist.get_world_size(flat.group)
        self.in_flight: ReduceScatter | None = None
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Drop collected gradients, after waiting for a reduce-scatter in flight."""
        if self.in_flight is not None:
            self.in_flight.wait()
        for parameter in self.flat.parameters:
            parameter.grad = None
        self.in_flight = self.buffer = self.unresolved = None
        self.ready: set[int] = set()  # indices of the parameters whose gradients have arrived

    @torch.no_grad()
    def add_gradient(self, index: int) -> None:
        """Move a parameter's gradient, times 1/N, into the flat tensor, or add it there."""
        parameter = self.flat.parameters[index]
        gradient, parameter.grad = parameter.grad, None  # frees autograd's tensor
        if self.buffer is None:
            self._allocate_buffer()
        view = self.views[index]
        if index in self.ready:
            view.add_(gradient, alpha=self.scale)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, self.scale, out=view)  # moved and scaled in one pass
        else:
            view.copy_(gradient).mul_(self.scale)  # widened before it is scaled
        self.ready.add(index)

    def _allocate_buffer(self) -> None:
        self.buffer = self.flat.new_empty(self.flat.master_dtype)  # [size]
        self.views = self.flat.view_as_params(self.buffer)

    @torch.no_grad()
    def start_reduce_scatter(self) -> None:
        """Start the reduce-scatter; a parameter without a gradient contributes zeros."""
        for index, parameter in enumerate(self.flat.parameters):
            if parameter.grad is not None:
                self.add_gradient(index)
        if self.buffer is None:
            self._allocate_buffer()
        # Filled on the device: copying a list to a GPU would make this process wait.
        self.had_gradient = torch.ones(len(self.views), dtype=torch.uint8, device=self.flat.device)
        for index, view in enumerate(self.views):
            if index not in self.ready:
                view.zero_()
                self.had_gradient[index].zero_()
        self.in_flight = ReduceScatter(self.buffer, self.flat.group, self.ordered)
        self.buffer, self.views = None, []

    @torch.no_grad()
    def finish_reduce_scatter(self) -> None:
        """Wait for the sum; give the pieces gradients if their parameter had one here."""
        if self.in_flight is None:
            return
        output = self.in_flight.flat[self.flat.shard_slice] if self.keep_full else None
        shard = self.in_flight.wait(output)  # [size / N]
        self.in_flight = None
        self._add_to_pieces(shard, self.ready)
        missing = set(range(len(self.flat.pieces))) - self.ready
        self.unresolved = (shard, missing) if missing else None
        self.ready = set()

    @torch.no_grad()
    def resolve_missing(self, had_gradient: Tensor) -> None:
        """Give gradients to the other pieces if any rank had one; had_gradient [params].

        Reading `had_gradient` waits for the GPU, so this only happens if gradients are missing.
        """
        if self.unresolved is not None:
            shard, missing = self.unresolved
            self._add_to_pieces(shard, {index for index in missing if had_gradient[index] > 0})
            self.unresolved = None

    def _add_to_pieces(self, shard: Tensor, indices: set[int]) -> None:
        parts = self.flat.split_shard(shard)
        for index, (piece, part) in enumerate(zip(self.flat.pieces, parts, strict=True)):
            if index in indices and piece.numel():
                piece.grad = part if piece.grad is None else piece.grad.add_(part)


class Reducer:
    """Sends and receives the `gradients` of a backward, in the order of the calls.

    Only one reduce-scatter is in flight at a time, so only one uses memory.
    """

    def __init__(self, gradients: Sequence[FlatGrads], group: dist.ProcessGroup):
        self.gradients, self.group = gradients, group
        self.sent: list[FlatGrads] = []  # sent in this backward; all but the last are received

    def start_reduce_scatter(self, gradients: FlatGrads) -> None:
        """Start a reduce-scatter, after the previous one has ended."""
        self.finish_reduce_scatter()
        gradients.start_reduce_scatter()
        self.sent.append(gradients)

    def finish_reduce_scatter(self) -> None:
        """Wait for the reduce-scatter in flight, if any."""
        if self.sent:
            self.sent[-1].finish_reduce_scatter()

    def finish_all(self) -> None:
        """Wait for the last one after backward, and resolve gradients missing here."""
        if self.sent:
            # [trainable parameters]: did any rank have a gradient? If not, the gradient stays None.
            had_gradient = torch.cat([g.had_gradient for g in self.sent])
            work = dist.all_reduce(had_gradient, dist.ReduceOp.MAX, self.group, async_op=True)
            self.finish_reduce_scatter()
            work.wait()
            parts = had_gradient.split([len(g.had_gradient) for g in self.sent])
            for gradients, part in zip(self.sent, parts, strict=True):
                gradients.resolve_missing(part)
        self.sent = []

    def discard_gradients(self) -> None:
        """Drop all gradients of a backward that an error has ended halfway."""
        for gradients in self.gradients:
            gradients.discard_gradients()
        self.sent = []
