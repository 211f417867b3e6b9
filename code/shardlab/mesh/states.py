"""Whole tensors from all ranks of a mesh, and back: state dicts and checkpoints.

A whole tensor is gathered in two steps: ZeRO's pieces on the replicas make the part that the tensor
group cuts (`gather_tp_shards`), and the group's parts make the whole tensor
(`gather_model_tensors`). A checkpoint takes only the first step: torch.distributed.checkpoint does
the second, for any ranks that load the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardlab.layout.parameters import list_params
from shardlab.measure import count
from shardlab.ranks.gather import gather_named_tensors, gather_parts
from shardlab.tensor_parallel.core import shard_slice, take_slice
from shardlab.zero.checkpointing import copy_to_pieces, gather_full_tensors, init_optimizer_states

if TYPE_CHECKING:
    from .core import Parallel

TensorGetter = Callable[[torch.nn.Parameter], Tensor | None]


@torch.no_grad()
def gather_tp_shards(job: Parallel, get_tensor: TensorGetter) -> dict[str, Tensor]:
    """Return a tensor for each parameter, cut as for this tensor rank; all replicas call this.

    get_tensor(piece): a tensor of the piece's shape, such as its gradient; None stands for zeros.
    """
    if not job.sharded:
        pairs = ((name, p, get_tensor(p)) for name, p in job.named_parameters())
        return {n: torch.zeros_like(p) if v is None else v.detach() for n, p, v in pairs}
    found: dict[str, Tensor] = {}
    for flat in job.flats:
        found |= gather_full_tensors(
            flat, [get_tensor(p) if p.numel() else None for p in flat.pieces]
        )
    return {name: found[name] for name, _ in job.named_parameters()}


@torch.no_grad()
def gather_model_tensors(
    job: Parallel, get_tensor: TensorGetter = lambda piece: piece
) -> dict[str, Tensor]:
    """Return a whole tensor for each parameter of the plain model, in its order, on every rank.

    Without `get_tensor` the result is the plain model's state dict; `lambda piece: piece.grad`
    gives its gradients. Every rank calls this; beside the result one tensor at a time is in memory.
    """
    mine = gather_tp_shards(job, get_tensor)
    for name, tensor in mine.items():
        several = job.num_shards[name]
        mine[name] = gather_parts(tensor, job.shard_dims[name], job.groups.tp, num_parts=several)
    places = {entry.name: place for place, entry in enumerate(list_params(job.config))}
    found = gather_named_tensors(mine, job.groups.pp, places)
    if job.config.tied:
        found.setdefault("head.weight", found["embedding.weight"])
    return found


# For `shardlab.checkpoint`: the tensors of a job under the plain model's names, and back.


@contextmanager
def checkpoint_tensors(
    job: Parallel, optimizer: torch.optim.Optimizer, to_load: bool
) -> Iterator[dict[str, Any]]:
    """Yield weights and optimizer states; parts of matrices are DTensors over the tensor group.

    Tensors with fewer parts than ranks are whole. All are copies, and ZeRO's pieces are gathered
    over the replicas first. to_load: yield states even if the optimizer has made no step.
    """
    has = torch.tensor(float(to_load or bool(optimizer.state)), device=job.pipeline.device)
    for group in job.groups:
        dist.all_reduce(has, dist.ReduceOp.MAX, group=group)  # a scalar
    if has:
        init_optimizer_states(job.parameters(), optimizer)
        job.mark_changed()  # warming a piece was an optimizer step, and then all ranks must gather
    mesh = DeviceMesh.from_group(job.groups.tp, job.pipeline.device.type)
    states = {name: optimizer.state.get(p, {}) for name, p in job.named_parameters()}
    kinds = sorted({(key, v.dim() > 0) for s in states.values() for key, v in s.items()})
    model = _to_dtensors(job, gather_tp_shards(job, lambda piece: piece), mesh)
    model |= {name: buffer.clone() for name, buffer in job.buffers_by_name.items()}
    moments: dict[str, dict[str, Tensor]] = {}
    for key, wide in kinds:
        if wide:
            shards = gather_tp_shards(job, lambda p, key=key: optimizer.state[p][key])
            values = _to_dtensors(job, shards, mesh)
        else:
            values = {name: state[key].clone() for name, state in states.items()}
        for name, value in values.items():
            moments.setdefault(job.checkpoint_name(name), {})[key] = value
    if job.config.tied and "embedding.weight" in model:
        model["head.weight"] = model["embedding.weight"]
    yield {"model": model, "optimizer": moments}


@torch.no_grad()
def restore(job: Parallel, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Copy the tensors of `checkpoint_tensors`, which a checkpoint has filled, into the pieces."""
    buffers, given = job.buffers_by_name, state["model"]
    for name, buffer in buffers.items():
        buffer.copy_(given[name])
    mine = {n: _take_tp_shard(job, n, value) for n, value in given.items() if n not in buffers}
    _load_pieces(job, mine, lambda piece: piece)
    pieces = dict(job.named_parameters())
    states = {name: state["optimizer"].get(job.checkpoint_name(name), {}) for name in pieces}
    for key in sorted({key for values in states.values() for key in values}):
        found = {n: _take_tp_shard(job, n, own[key]) for n, own in states.items() if key in own}
        if all(value.dim() == 0 for value in found.values()):
            for name, value in found.items():
                optimizer.state[pieces[name]][key].copy_(value)
        else:
            nothing = {name: torch.zeros_like(mine[name]) for name in pieces.keys() - found.keys()}
            _load_pieces(job, found | nothing, lambda piece, key=key: optimizer.state[piece][key])
    for name, values in states.items():
        if not values:  # parameters without a gradient so far have no optimizer state
            optimizer.state.pop(pieces[name], None)
    job.mark_changed()


def _load_pieces(job: Parallel, values: dict[str, Tensor], target: Callable[[Any], Tensor]) -> None:
    """Copy `values`, by parameter and as the tensor group cuts them, into the pieces' targets."""
    if not job.sharded:
        for name, parameter in job.named_parameters():
            target(parameter).copy_(values[name])
        return
    for flat in job.flats:
        copy_to_pieces(
            flat, values, {n: target(p) for n, p in zip(flat.names, flat.pieces, strict=True)}
        )


def _to_dtensors(job: Parallel, mine: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    found = {}
    for name, tensor in mine.items():
        dimension, several = job.shard_dims[name], job.num_shards[name]
        if 1 < mesh.size() != several and dimension is not None:
            tensor = gather_parts(tensor, dimension, job.groups.tp, num_parts=several)
        elif dimension is not None and mesh.size() > 1:
            tensor = DTensor.from_local(tensor.clone(), mesh, [Shard(dimension)], run_check=False)
        found[name] = tensor
    return found


def _take_tp_shard(job: Parallel, name: str, value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        return value.to_local()
    dimension, tp, several = job.shard_dims[name], job.groups.tp, job.num_shards[name]
    if dimension is None or value.dim() == 0:
        return value
    return take_slice(value, dimension, shard_slice(name, value.shape[dimension], tp, several))


# Measured counterparts of the predictions in `predict`.


def measure_state_bytes(job: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Measure the bytes of model states, counted by storage, as `predict_state_bytes` does."""
    trained = list(job.parameters())
    plain = [part.module for part in job.sharded] or job.pipeline.parts
    # With ZeRO: the tensors for computing, and the pieces.
    there = [*nn.ModuleList(plain).parameters(), *trained]
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": count.sum_bytes(there),
        "gradients": count.sum_bytes(p.grad for p in there if p.grad is not None),
        "optimizer": count.sum_bytes(v for v in kept if isinstance(v, torch.Tensor) and v.dim()),
    }


def count_sent_bytes(sent: count.Traffic, job: Parallel) -> dict[str, float]:
    """Return the bytes that left this rank along "tp", "pp" (twins included) and "dp"."""
    groups = {axis: {group} for axis, group in job.groups._asdict().items()}
    groups["pp"].add(job.pipeline.mailbox.reverse_group)  # with nccl, a group of its own
    return {
        axis: sum(sent.get_group_traffic(group).count_ring_bytes(group.size()) for group in several)
        for axis, several in groups.items()
    }
