"""Resharding: transfer weights from one layout to another, one tensor at a time.

All ranks compute the same plan from the parts that each rank has and wants. If several ranks have a
part, they take turns to send it; a rank copies its own parts locally. So bytes can be predicted.

    a trainer's ranks, tp 4      a generator's ranks, tp 2
    [0] [1] [2] [3]       ->     [0 1] [2 3]                   for every matrix
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardlab.layout.boxes import (
    Box,
    TensorPiece,
    count_elements,
    get_slices,
    infer_full_shapes,
    intersect_boxes,
    make_full_box,
)
from shardlab.layout.parameters import list_params
from shardlab.ranks import check_group
from shardlab.ranks.gather import gather_objects
from shardlab.ranks.p2p import exchange_all
from shardlab.zero.wrapper import ShardedModule

from .folder import strip_wrapper_names, unwrap_model

Parts = Sequence[tuple[str, Box]]  # a rank's parts of tensors: (tensor's name, box)


class Transfer(NamedTuple):
    """A part that one rank sends to another, or copies locally if source and target are equal."""

    source: int
    target: int
    box: Box


Holders = dict[Box, list[int]]  # disjoint parts of a tensor -> the ranks that have them


def find_holders(parts: Sequence[Parts]) -> dict[str, Holders]:
    """Return each tensor's parts with the ranks that have them, from each rank's parts."""
    found: dict[str, Holders] = defaultdict(dict)
    for rank, mine in enumerate(parts):
        for name, box in mine:
            if count_elements(box):
                found[name].setdefault(box, []).append(rank)
    return found


def plan_transfers(holders: Holders, wanted: Iterable[tuple[int, Box]]) -> list[Transfer] | None:
    """Plan the transfers that give each rank the parts it wants; None if some elements are missing.

    A rank that has a part copies it locally; otherwise the ranks that have it take turns.
    """
    found = []
    for rank, box in wanted:
        missing = count_elements(box)
        for theirs, ranks in holders.items():
            if (both := intersect_boxes(box, theirs)) is not None:
                source = rank if rank in ranks else ranks[rank % len(ranks)]
                found.append(Transfer(source, rank, both))
                missing -= count_elements(both)
        if missing:
            return None
    return found


def run_transfers(
    plan: Sequence[Transfer],
    mine: Sequence[TensorPiece],
    wanted: Sequence[TensorPiece],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    device: torch.device | None = None,
) -> None:
    """Run this rank's transfers of one tensor: from `mine` to `wanted`, which has `dtype`.

    group: the plan uses its rank numbers; None: a single process. device: the device of messages;
    None: the pieces' own. All ranks that the plan names call it; on other ranks it does nothing.
    """
    rank = 0 if group is None else dist.get_rank(group)
    outgoing: list[tuple[Tensor, int]] = []
    incoming: list[tuple[Tensor, int]] = []
    for source, target, box in plan:
        if source == rank:
            part = _view_box(mine, box).to(device=device, dtype=dtype)
            if target == rank:
                _view_box(wanted, box).copy_(part)
            else:
                outgoing.append((part, target))
        elif target == rank:
            incoming.append((_view_box(wanted, box), source))
    exchange_all(outgoing, incoming, group).wait()


def _view_box(pieces: Sequence[TensorPiece], box: Box) -> Tensor:
    """Return a view of `box` in the piece that contains it."""
    for piece in pieces:
        if intersect_boxes(box, piece.box) == box:
            return piece.tensor[get_slices(box, piece.box)]
    raise AssertionError(box)


@torch.no_grad()
def transfer_weights(
    source: nn.Module | None, target: nn.Module | None, group: dist.ProcessGroup
) -> None:
    """Copy the weights of `source` to `target`, a model of the same shape in another layout.

        transfer_weights(trainer, generator, dist.group.WORLD)     # while the job runs

    Collective over `group`. On each rank either model may be None: the ranks of trainer and
    generator can be the same, overlap or differ. A rank sends only the parts that other ranks lack,
    in the target's dtype. Temporary copies are of one tensor at a time.

    Raises ValueError on every rank, before any transfer, if source and target tensors differ.
    """
    check_group(group)
    sources, targets = ([] if m is None else list_pieces(m) for m in (source, target))
    own_dtypes = {piece.name: piece.tensor.dtype for piece in targets}
    reports = gather_objects((list_parts(sources), list_parts(targets), own_dtypes), group)
    plans = plan_tensors([parts for parts, _, _ in reports], [parts for _, parts, _ in reports])
    dtypes = {name: dtype for *_, each in reports for name, dtype in each.items()}
    mine, wanted = group_by_name(sources), group_by_name(targets)
    for name, plan in plans.items():
        run_transfers(plan, mine[name], wanted[name], dtypes[name], group)
    if target is not None:
        notify_weights_changed(target)


def predict_transfer_bytes(
    before: Sequence[Parts], after: Sequence[Parts], itemsize: int = 4
) -> list[int]:
    """Return the bytes that each rank sends in `transfer_weights`.

    before, after: the parts of each rank, in the group's order; [] for a rank without that model.
    `mesh.predict_pieces` returns a layout's parts. itemsize: bytes of an element of the target.
    """
    if len(before) != len(after):
        raise ValueError(f"after: must have {len(before)} ranks, as before has, not {len(after)}")
    sent = [0] * len(before)
    for name, plan in plan_tensors(before, after).items():
        each = 4 if name.endswith("bias_E") else itemsize  # bias_E is float32 in any model
        for move in plan:
            if move.source != move.target:
                sent[move.source] += each * count_elements(move.box)
    return sent


def plan_tensors(before: Sequence[Parts], after: Sequence[Parts]) -> dict[str, list[Transfer]]:
    """Return the transfers of each tensor.

    Raises ValueError if no rank has some part that is wanted, and if names or shapes differ.
    """
    holders, found = find_holders(before), {}
    for name, boxes in find_holders(after).items():
        wanted = sorted((rank, box) for box, ranks in boxes.items() for rank in ranks)
        found[name] = plan_transfers(holders[name], wanted)
    problems = [f"the source lacks parts of {name}" for name, plan in found.items() if plan is None]
    sources, targets = (infer_full_shapes(chain.from_iterable(side)) for side in (before, after))
    for name in sources if targets else ():  # without any target there is nothing to compare
        if sources[name] != targets.get(name):
            has = f"is {list(targets[name])}" if name in targets else "is missing"
            problems.append(f"{name} {has}, and {list(sources[name])} in the source")
    if problems:
        raise ValueError(f"target: must have the same tensors as the source, but {problems[0]}")
    return found


def group_by_name(pieces: Iterable[TensorPiece]) -> dict[str, list[TensorPiece]]:
    """Group the pieces by their tensor's name."""
    names: dict[str, list[TensorPiece]] = defaultdict(list)
    for piece in pieces:
        names[piece.name].append(piece)
    return names


def list_parts(pieces: Iterable[TensorPiece]) -> list[tuple[str, Box]]:
    """Return the names and boxes of pieces, without the tensors, to send to other ranks."""
    return [(piece.name, piece.box) for piece in pieces]


# A rank's parts of the plain model's tensors, for models with any kind of sharding.


def list_pieces(model: nn.Module) -> list[TensorPiece]:
    """Return this rank's parameters and buffers, as parts of the plain model's tensors.

    Tied tensors are returned once. model: plain, data-parallel, sharded by `tensor_parallel`,
    `experts`, `zero`, `fully_shard` (or any other use of DTensors), or on a mesh.
    """
    model = unwrap_model(model)
    if isinstance(model, ShardedModule):
        return model.pieces(_get_tensor_parallel_boxes(model.module))
    if hasattr(model, "pieces"):
        return model.pieces()
    boxes, persistent = _get_tensor_parallel_boxes(model), model.state_dict(keep_vars=True).keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    tensors = [*model.named_parameters(), *buffers]
    return [_make_piece(strip_wrapper_names(name), tensor, boxes) for name, tensor in tensors]


def _get_tensor_parallel_boxes(model: nn.Module) -> dict[str, Box]:
    """Return this rank's boxes of the plain model's tensors, if the model is tensor-parallel."""
    group = getattr(model, "tensor_group", None)
    if group is None:
        return {}
    rank, size = check_group(group)
    return {entry.name: entry.get_box(rank, size) for entry in list_params(model.config)}


def _make_piece(name: str, tensor: Tensor, boxes: Mapping[str, Box]) -> TensorPiece:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return TensorPiece(name, boxes.get(name, make_full_box(tensor.shape)), tensor)
    local = tensor.to_local()
    sizes, first = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    box = tuple((begin, begin + size) for begin, size in zip(first, sizes, strict=True))
    return TensorPiece(name, box, local[tuple(slice(size) for size in sizes)])


def notify_weights_changed(model: nn.Module) -> None:
    """Notify a model that its pieces have new values (collective)."""
    if hasattr(model := unwrap_model(model), "mark_changed"):
        model.mark_changed()
