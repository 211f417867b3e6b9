"""Gather objects, named tensors and parts of a tensor from all ranks of a group, and sum tensors.

Every rank of the group makes the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.common import gpu

from .p2p import get_backend, irecv, isend
from .torch_compat import all_gather_single, reduce_scatter_single


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the objects of all ranks of `group`, in rank order; they must be picklable."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, mine, group=group)
    return objects


def gather_named_tensors(
    mine: Mapping[str, Tensor], group: dist.ProcessGroup, order: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Return all ranks' tensors by name, on every rank, without copies of the rank's own tensors.

    Each tensor is broadcast alone. If several ranks have a name, the first of them sends it. order:
    sort keys of this rank's names for the result; None: the result is in rank order.
    """
    rank, device = dist.get_rank(group), next((t.device for t in mine.values()), None)
    order = dict.fromkeys(mine, 0) if order is None else order
    by_rank = gather_objects([(order[n], n, t.shape, t.dtype) for n, t in mine.items()], group)
    entries = [(src, *entry) for src, entries in enumerate(by_rank) for entry in entries]
    tensors: dict[str, Tensor] = {}
    for src, _, name, shape, dtype in sorted(entries, key=lambda entry: entry[1]):
        if name in tensors:
            continue
        own = mine[name].contiguous() if src == rank else None
        tensors[name] = torch.empty(shape, dtype=dtype, device=device) if own is None else own
        dist.broadcast(tensors[name], dist.get_global_rank(group, src), group=group)
    return tensors


def gather_parts(
    mine: Tensor,
    dimension: int | None,
    group: dist.ProcessGroup,
    dst: int | None = None,
    num_parts: int | None = None,
) -> Tensor | None:
    """Concatenate all ranks' equal parts along `dimension`; None: return a copy of `mine`.

    dst: the rank of the group that gets the tensor (the others get None); None: all ranks.
    num_parts: the number of parts, if neighbouring ranks hold the same part; None: one per rank.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if dimension is None or size == 1:
        return mine.clone() if dst in (None, rank) else None
    mine = mine.contiguous()
    if dst not in (None, rank):
        isend(mine, dst, group).wait()
        return None
    parts = mine.new_empty((size, *mine.shape))
    if dst is None:
        all_gather_single(parts.view(-1), mine.view(-1), group=group)  # [part] to [t, part]
    else:
        parts[rank] = mine
        for src in (r for r in range(size) if r != rank):
            irecv(parts[src], src, group).wait()
    return torch.cat(list(parts[:: size // (num_parts or size)]), dimension)


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
    if gpu.is_gpu_backend(get_backend(x.device, group)) and equal:
        total = x.new_empty((m, *x.shape[1:]))
        work = reduce_scatter_single(total, x, group=group, async_op=True)
        return lambda: (work.wait(), total)[1]
    received = x.new_empty((size * m, *x.shape[1:]))
    cuts = {} if rows is None else {"output_split_sizes": [m] * size, "input_split_sizes": rows}
    work = dist.all_to_all_single(received, x, group=group, async_op=True, **cuts)

    def wait_and_sum() -> Tensor:
        work.wait()
        first, second, *others = received.view(size, m, *x.shape[1:])
        total = first + second
        for part in others:
            total += part
        return total

    return wait_and_sum
