"""Gather from the ranks of a group: objects, tensors by name, parts of a tensor, and sums.

Every rank of the group makes the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.common import gpu

from .p2p import carrier, irecv, isend
from .renamed import all_gather_single, reduce_scatter_single


def gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the objects of all ranks of `group`, in rank order; they must be picklable."""
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def named(
    mine: Mapping[str, Tensor], group: dist.ProcessGroup, places: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Return all ranks' tensors by name, on every rank; a rank's own are the tensors it gave.

    Each tensor is sent alone. If several ranks have a name, the first of them sends it. places: the
    position of this rank's names in the result; without it the result is in rank order.
    """
    rank, device = dist.get_rank(group), next((t.device for t in mine.values()), None)
    places = dict.fromkeys(mine, 0) if places is None else places
    told = gathered([(places[n], n, t.shape, t.dtype) for n, t in mine.items()], group)
    entries = [(source, *entry) for source, theirs in enumerate(told) for entry in theirs]
    found: dict[str, Tensor] = {}
    for source, _, name, shape, dtype in sorted(entries, key=lambda entry: entry[1]):
        if name in found:
            continue
        own = mine[name].contiguous() if source == rank else None
        found[name] = torch.empty(shape, dtype=dtype, device=device) if own is None else own
        dist.broadcast(found[name], dist.get_global_rank(group, source), group=group)
    return found


def joined(
    mine: Tensor,
    dimension: int | None,
    group: dist.ProcessGroup,
    to: int | None = None,
    several: int | None = None,
) -> Tensor | None:
    """Concatenate all ranks' equal parts along `dimension`; None: return a copy of `mine`.

    to: the rank of the group that gets the tensor (the others get None); None: all ranks. several:
    the number of parts, if neighbouring ranks hold the same part; None: one per rank.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if dimension is None or size == 1:
        return mine.clone() if to in (None, rank) else None
    mine = mine.contiguous()
    if to not in (None, rank):
        isend(mine, to, group).wait()
        return None
    parts = mine.new_empty((size, *mine.shape))
    if to is None:
        all_gather_single(parts.view(-1), mine.view(-1), group=group)  # a part to [t, part]
    else:
        parts[rank] = mine
        for source in (r for r in range(size) if r != rank):
            irecv(parts[source], source, group).wait()
    return torch.cat(list(parts[:: size // (several or size)]), dimension)


def reduce_scatter(
    x: Tensor, group: dist.ProcessGroup, rows: Sequence[int] | None = None
) -> Callable[[], Tensor]:
    """Start to add up all ranks' `x` [sum of rows, …]; call the result to get this rank's rows.

    Every rank sends part j directly to rank j, which adds up the parts in rank order: (N-1)/N of
    the bytes, as any reduce-scatter, and bitwise reproducible. gloo's own is an all-reduce with
    twice as many bytes. For equal parts nccl's own is better and is used.

    rows: for each rank, by default equal.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    equal = rows is None or len(set(rows)) == 1
    m = len(x) // size if rows is None else rows[rank]
    if gpu.is_gpu_backend(carrier(x.device, group)) and equal:
        total = x.new_empty((m, *x.shape[1:]))
        work = reduce_scatter_single(total, x, group=group, async_op=True)
        return lambda: (work.wait(), total)[1]
    received = x.new_empty((size * m, *x.shape[1:]))
    cuts = {} if rows is None else {"output_split_sizes": [m] * size, "input_split_sizes": rows}
    work = dist.all_to_all_single(received, x, group=group, async_op=True, **cuts)

    def finish() -> Tensor:
        work.wait()
        first, second, *others = received.view(size, m, *x.shape[1:])
        total = first + second
        for part in others:
            total += part
        return total

    return finish
