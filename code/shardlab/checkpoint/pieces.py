"""What a rank has of a model, whatever has cut it: parts of the plain model's tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from shardlab.data_parallel import DataParallel
from shardlab.layout.boxes import Box, Piece, whole
from shardlab.layout.entries import ledger
from shardlab.ranks import check_group
from shardlab.zero.wrapper import Sharded

from .contents import plain_name


def unwrapped(model: nn.Module) -> nn.Module:
    """The model, out of DataParallel's wrapper, which would add to every name."""
    return model.module if isinstance(model, DataParallel | DistributedDataParallel) else model


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
    cut, found = _cut(model), []
    lasting = set(model.state_dict(keep_vars=True))
    for name, parameter in model.named_parameters():
        found.append(_piece(plain_name(name), parameter, cut))
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in lasting]
    return found + [_piece(plain_name(name), buffer, cut) for name, buffer in buffers]


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
