"""A sharded model's tensors for `shardlab.checkpoint`: row shards under the plain module's names.

A rank's pieces are ranges of a flat tensor, which checkpoint libraries cannot place in a parameter.
So one flat tensor at a time is gathered, and each rank keeps its rows of every parameter in it.
These checkpoints equal those of `fully_shard` or of one process, and any of them can read them.
Beyond its own 1/N of everything, a rank needs memory for one flat tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardlab.layout.boxes import Box, TensorPiece, count_elements, get_box_shape, iter_range_boxes
from shardlab.ranks.gather import gather_objects

from .flat import FlatParams, all_gather


def init_optimizer_states(pieces: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Create missing optimizer states of pieces: a step at learning rate 0 with zero gradients."""
    pieces = list(pieces)
    if all(p in optimizer.state for p in pieces):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    before = {p: p.grad for p in pieces}
    steps = [v for s in optimizer.state.values() for v in s.values() if not v.dim()]
    made = float(steps[0]) if steps else 0.0
    for p in pieces:  # pieces that have states already are skipped
        p.grad = None if p in optimizer.state else torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p in pieces:
        if p.grad is not None:
            for value in optimizer.state[p].values():
                value.fill_(0.0 if value.dim() else made)
        p.grad = before[p]


def collect_optimizer_states(
    flats: list[FlatParams],
    pieces: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
) -> dict[str, dict[str, Tensor]]:
    """Return the states that any rank has, by name: as rows; scalars and frozen weights' whole.

    A rank without elements of a parameter makes no step for it, so its step counter stays behind.
    """
    dealt = {name for flat in flats for name in flat.names}
    mine: dict[str, dict[str, Any]] = {}  # None: one number per element
    wrong = None
    for name, piece in pieces.items():
        state = optimizer.state.get(piece, {}) if piece.numel() else {}
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() and value.shape != piece.shape:
                wrong = f"{key} of {name}"
            else:
                as_rows = name in dealt and value.dim()
                mine.setdefault(name, {})[key] = None if as_rows else value.cpu()
    everyone = gather_objects((mine, wrong), group)
    if problems := [problem for _, problem in everyone if problem]:
        words = f"{problems[0]} must have one number per element, or be a scalar"
        raise ValueError(f"optimizer={type(optimizer).__name__}: {words}")
    known = {name: dict(of) for found, _ in reversed(everyone) for name, of in found.items()}
    for key in sorted({key for of in known.values() for key, value in of.items() if value is None}):
        names = [name for name, of in known.items() if of.get(key, 0) is None]
        values = {name: optimizer.state.get(pieces[name], {}).get(key) for name in names}
        for name, value in gather_rows(flats, values).items():
            known[name][key] = value
    return known


def gather_full_tensors(flat: FlatParams, values: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return whole tensors by name, in the masters' dtype, from all ranks' values for their pieces.

    values: this rank's, one for each piece and of its shape; None stands for zeros. Every rank of
    the flat tensor's group calls this.
    """
    full = flat.new_empty(flat.master_dtype).zero_()
    for value, place in zip(values, flat.split_shard(full[flat.shard_slice]), strict=True):
        if place.numel() and value is not None:
            place.copy_(value.detach())
    all_gather(full, flat.shard_slice, flat.group).wait()
    return dict(zip(flat.names, flat.view_as_params(full), strict=True))


def copy_to_pieces(flat: FlatParams, values: dict[str, Any], targets: dict[str, Tensor]) -> None:
    """Copy this rank's part of `values` (whole tensors or rows, by name) into its `targets`."""
    if targets.keys().isdisjoint(flat.names):
        return
    full = flat.new_empty(flat.master_dtype)
    views, parts = flat.view_as_params(full), flat.split_shard(full[flat.shard_slice])
    for name, view, part in zip(flat.names, views, parts, strict=True):
        if name in targets:
            value = values[name]
            view.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
            targets[name].copy_(part)


def list_pieces(flat: FlatParams, boxes: Mapping[str, Box]) -> Iterator[TensorPiece]:
    """Yield this rank's pieces of a flat tensor; boxes: each parameter's, in the plain tensor."""
    ranges = flat.list_owned_ranges()
    for name, piece, (first, last) in zip(flat.names, flat.pieces, ranges, strict=True):
        end = 0
        for box in iter_range_boxes(boxes[name], first, last):
            begin, end = end, end + count_elements(box)
            yield TensorPiece(name, box, piece.detach()[begin:end].view(get_box_shape(box)))


def gather_rows(flats: list[FlatParams], values: Mapping[str, Tensor | None]) -> dict[Any, Tensor]:
    """Return this rank's rows, by name, of the `values` that any rank has for its pieces."""
    found: dict[Any, Tensor] = {}
    for flat in flats:
        if values.keys().isdisjoint(flat.names):
            continue
        rank, size = dist.get_rank(flat.group), dist.get_world_size(flat.group)
        mesh = DeviceMesh.from_group(flat.group, flat.device.type)
        own = [values.get(name) for name in flat.names]
        for name, view in gather_full_tensors(flat, own).items():
            if name not in values:
                continue
            if not view.dim():
                found[name] = view.clone()
                continue
            chunks = view.chunk(size)  # some ranks may have none
            local = (chunks[rank] if rank < len(chunks) else view[:0]).clone()
            full = {"shape": view.shape, "stride": view.stride()}
            found[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **full)
    return found
