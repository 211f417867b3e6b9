"""Weights under one layout become weights under another: who sends what, and one tensor at a time.

All ranks make the same plan, from what each of them has and what each wants: a part that two have
is asked of each in turn, and who has a part himself sends nothing. So bytes are known before.

    a trainer's ranks, tp 4      a generator's ranks, tp 2
    [0] [1] [2] [3]       ->     [0 1] [2 3]                   of every matrix
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

from shardlab.layout.boxes import Box, Piece, common, elements, spanned, whole, within
from shardlab.layout.entries import ledger
from shardlab.ranks import check_group
from shardlab.ranks.gather import gathered
from shardlab.ranks.p2p import exchange_all
from shardlab.zero.wrapper import Sharded

from .folder import plain_name, unwrapped

Parts = Sequence[tuple[str, Box]]  # of a rank: names of tensors, and what it has of them


class Transfer(NamedTuple):
    """What one rank sends another, or has to copy where it is."""

    source: int
    target: int
    box: Box


Holders = dict[Box, list[int]]  # parts of a tensor that have nothing in common, and who has them


def holders(parts: Sequence[Parts]) -> dict[str, Holders]:
    """By tensor, its parts and the ranks that have them, from what each rank has."""
    found: dict[str, Holders] = defaultdict(dict)
    for rank, mine in enumerate(parts):
        for name, box in mine:
            if elements(box):
                found[name].setdefault(box, []).append(rank)
    return found


def transfers(have: Holders, wanted: Iterable[tuple[int, Box]]) -> list[Transfer] | None:
    """Who sends what, so that each rank gets what it wants; None where nobody has it all.

    A rank that has it sends itself nothing; of several others each is asked in turn.
    """
    found = []
    for rank, box in wanted:
        missing = elements(box)
        for theirs, ranks in have.items():
            if (both := common(box, theirs)) is not None:
                source = rank if rank in ranks else ranks[rank % len(ranks)]
                found.append(Transfer(source, rank, both))
                missing -= elements(both)
        if missing:
            return None
    return found


def carry(
    plan: Sequence[Transfer],
    mine: Sequence[Piece],
    wanted: Sequence[Piece],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    device: torch.device | None = None,
) -> None:
    """Take part in the transfers of one tensor: out of `mine`, into `wanted`, which has `dtype`.

    group: with its own numbers in the plan; None: one process. device: where what is sent has to
    be; None: where it is. All ranks that the plan names call it; on others nothing happens.
    """
    rank = 0 if group is None else dist.get_rank(group)
    outgoing: list[tuple[Tensor, int]] = []
    incoming: list[tuple[Tensor, int]] = []
    for source, target, box in plan:
        if source == rank:
            part = _part(mine, box).to(device=device, dtype=dtype)
            if target == rank:
                _part(wanted, box).copy_(part)
            else:
                outgoing.append((part, target))
        elif target == rank:
            incoming.append((_part(wanted, box), source))
    exchange_all(outgoing, incoming, group).wait()


def _part(among: Sequence[Piece], box: Box) -> Tensor:
    """What stands in `box`: a view into the piece that holds it."""
    for piece in among:
        if common(box, piece.box) == box:
            return piece.tensor[within(box, piece.box)]
    raise AssertionError(box)


@torch.no_grad()
def hand_over(source: nn.Module | None, target: nn.Module | None, group: dist.ProcessGroup) -> None:
    """Give the weights of `source` to `target`, a model of the same shape under another layout.

        hand_over(trainer, generator, dist.group.WORLD)     # while the job runs

    On each rank of `group`, of which all call it, either may be None: a trainer's ranks may be a
    generator's as well, or others. A rank sends to others what they need and do not have, in the
    dtype in which they want it; of one tensor at a time there is a copy.

    Raises ValueError, on every rank and before anything is sent, where a part of the target's
    tensors is nowhere, and where source and target do not have the same tensors.
    """
    check_group(group)
    there, wants = ([] if model is None else pieces(model) for model in (source, target))
    kinds = {piece.name: piece.tensor.dtype for piece in wants}
    everyones = gathered((parts_of(there), parts_of(wants), kinds), group)
    plans = planned([parts for parts, _, _ in everyones], [parts for _, parts, _ in everyones])
    dtypes = {name: dtype for *_, each in everyones for name, dtype in each.items()}
    mine, wanted = by_name(there), by_name(wants)
    for name, plan in plans.items():
        carry(plan, mine[name], wanted[name], dtypes[name], group)
    if target is not None:
        changed(target)


def predicted_hand_over(
    before: Sequence[Parts], after: Sequence[Parts], itemsize: int = 4
) -> list[int]:
    """Bytes that each rank sends in `hand_over`, from what each has, and what each is to have.

    before, after: for each rank of the group, in its order; [] for one without such a model.
    `mesh.predicted_pieces` are those of a layout. itemsize: bytes of a number of the target's.
    """
    if len(before) != len(after):
        raise ValueError(f"after has {len(after)} ranks: allowed are {len(before)}, as before")
    sent = [0] * len(before)
    for name, plan in planned(before, after).items():
        each = 4 if name.endswith("bias_E") else itemsize  # it is float32 in a model of any dtype
        for move in plan:
            if move.source != move.target:
                sent[move.source] += each * elements(move.box)
    return sent


def planned(before: Sequence[Parts], after: Sequence[Parts]) -> dict[str, list[Transfer]]:
    """Return, by tensor, who sends what.

    Raises ValueError where something is wanted that nobody has, and for other names or shapes.
    """
    have, found = holders(before), {}
    for name, boxes in holders(after).items():
        wanted = sorted((rank, box) for box, ranks in boxes.items() for rank in ranks)
        found[name] = transfers(have[name], wanted)
    wrong = [f"{name} is not all in the source" for name, plan in found.items() if plan is None]
    there, own = (spanned(chain.from_iterable(side)) for side in (before, after))
    for name in there if own else ():  # where nobody has a target, there is nothing to compare
        if there[name] != own.get(name):
            has = f"is {list(own[name])}" if name in own else "is missing"
            wrong.append(f"{name} {has}, and {list(there[name])} in the source")
    if wrong:
        text = "allowed are models whose tensors the source has, whole and of the same shape"
        raise ValueError(f"target: {wrong[0]}; {text}")
    return found


def by_name(found: Iterable[Piece]) -> dict[str, list[Piece]]:
    """The pieces of each tensor."""
    names: dict[str, list[Piece]] = defaultdict(list)
    for piece in found:
        names[piece.name].append(piece)
    return names


def parts_of(found: Iterable[Piece]) -> list[tuple[str, Box]]:
    """Of pieces what has to be known of them elsewhere."""
    return [(piece.name, piece.box) for piece in found]


# What a rank has of a model, whatever has cut it: parts of the plain model's tensors.


def pieces(model: nn.Module) -> list[Piece]:
    """This rank's parameters and buffers, as parts of the plain model's tensors; tied ones once.

    model: plain, in copies, cut by `tensor_parallel` or `experts`, in shards of `zero` or of
    `fully_shard` (and any other with DTensors), or on a mesh.
    """
    model = unwrapped(model)
    if isinstance(model, Sharded):
        return model.pieces(_cut(model.module))
    if hasattr(model, "pieces"):
        return model.pieces()
    cut, lasting = _cut(model), model.state_dict(keep_vars=True).keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in lasting]
    tensors = [*model.named_parameters(), *buffers]
    return [_piece(plain_name(name), tensor, cut) for name, tensor in tensors]


def _cut(model: nn.Module) -> dict[str, Box]:
    """Which parts of the plain model's tensors are there, where `tensor_parallel` has cut it."""
    group = getattr(model, "tensor_group", None)
    if group is None:
        return {}
    rank, size = check_group(group)
    return {entry.name: entry.box(rank, size) for entry in ledger(model.config)}


def _piece(name: str, tensor: Tensor, cut: Mapping[str, Box]) -> Piece:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Piece(name, cut.get(name, whole(tensor.shape)), tensor)
    here = tensor.to_local()
    sizes, first = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    box = tuple((begin, begin + size) for begin, size in zip(first, sizes, strict=True))
    return Piece(name, box, here[tuple(slice(size) for size in sizes)])


def changed(model: nn.Module) -> None:
    """Tell a model that its pieces have new values; all ranks call it."""
    if hasattr(model := unwrapped(model), "changed"):
        model.changed()
