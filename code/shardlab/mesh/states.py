"""What a model on a mesh looks like from outside: whole tensors from all ranks, and back.

A whole tensor is found in two steps: the pieces that ZeRO has dealt out to the copies make a part
as the tensor group cuts it (`local`), and the group's parts all of it (`full_tensors`). A
checkpoint takes the first step alone: torch.distributed.checkpoint does the second, for whatever
ranks read it.
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

from shardlab.layout.entries import ledger
from shardlab.measure import count
from shardlab.ranks.gather import joined, named
from shardlab.tensor_parallel.core import shard_slice, take
from shardlab.zero.saved import assembled, deal_out, warm

if TYPE_CHECKING:
    from .core import Parallel

Of = Callable[[torch.nn.Parameter], Tensor | None]


@torch.no_grad()
def local(job: Parallel, of: Of) -> dict[str, Tensor]:
    """By name, `of` each parameter as this rank's tensor group cuts it; all copies call it.

    of(piece) is a tensor of the piece's shape, such as its gradient; None stands for zeros.
    """
    if not job.sharded:
        pairs = ((name, p, of(p)) for name, p in job.named_parameters())
        return {n: torch.zeros_like(p) if v is None else v.detach() for n, p, v in pairs}
    found: dict[str, Tensor] = {}
    for flat in job.flats:
        found |= assembled(flat, [of(p) if p.numel() else None for p in flat.pieces])
    return {name: found[name] for name, _ in job.named_parameters()}


@torch.no_grad()
def full_tensors(job: Parallel, of: Of = lambda piece: piece) -> dict[str, Tensor]:
    """`of` each parameter of the plain model, whole and in its order, on every rank.

    full_tensors(job): the plain model's state dict; with `lambda piece: piece.grad`, its gradients.
    Every rank calls it; beside the result one tensor at a time is in memory.
    """
    mine = local(job, of)
    for name, tensor in mine.items():
        mine[name] = joined(tensor, job.cuts[name], job.groups.tp, several=job.several[name])
    places = {entry.name: place for place, entry in enumerate(ledger(job.config))}
    found = named(mine, job.groups.pp, places)
    if job.config.tied:
        found.setdefault("head.weight", found["embedding.weight"])
    return found


# For `shardlab.checkpoint`: the tensors of a job by the plain model's names, and back.


@contextmanager
def checkpoint_tensors(
    job: Parallel, optimizer: torch.optim.Optimizer, to_load: bool
) -> Iterator[dict[str, Any]]:
    """Weights and optimizer states; parts of matrices as DTensors along the tensor group.

    What has fewer parts than ranks stands there whole. They are copies: pieces of ZeRO's are
    gathered over the copies of the model first. to_load: with
    states even if the optimizer has made no step.
    """
    has = torch.tensor(float(to_load or bool(optimizer.state)), device=job.pipeline.device)
    for group in job.groups:
        dist.all_reduce(has, dist.ReduceOp.MAX, group=group)  # a scalar
    if has:
        warm(job.parameters(), optimizer)
        job.changed()  # where a piece was warmed, it was a step: one rank's, all's
    mesh = DeviceMesh.from_group(job.groups.tp, job.pipeline.device.type)
    states = {name: optimizer.state.get(p, {}) for name, p in job.named_parameters()}
    kinds = sorted({(key, v.dim() > 0) for s in states.values() for key, v in s.items()})
    model = _named(job, local(job, lambda piece: piece), mesh)
    model |= {name: buffer.clone() for name, buffer in job.untrained.items()}
    moments: dict[str, dict[str, Tensor]] = {}
    for key, wide in kinds:
        if wide:
            values = _named(job, local(job, lambda p, key=key: optimizer.state[p][key]), mesh)
        else:
            values = {name: state[key].clone() for name, state in states.items()}
        for name, value in values.items():
            moments.setdefault(job.checkpoint_name(name), {})[key] = value
    if job.config.tied and "embedding.weight" in model:
        model["head.weight"] = model["embedding.weight"]
    yield {"model": model, "optimizer": moments}


@torch.no_grad()
def restore(job: Parallel, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put such tensors, which a checkpoint has filled, into this rank's pieces."""
    untrained, given = job.untrained, state["model"]
    for name, buffer in untrained.items():
        buffer.copy_(given[name])
    mine = {n: _local(job, n, value) for n, value in given.items() if n not in untrained}
    _give(job, mine, lambda piece: piece)
    own = dict(job.named_parameters())
    states = {name: state["optimizer"].get(job.checkpoint_name(name), {}) for name in own}
    for key in sorted({key for values in states.values() for key in values}):
        found = {name: _local(job, name, of[key]) for name, of in states.items() if key in of}
        if all(value.dim() == 0 for value in found.values()):
            for name, value in found.items():
                optimizer.state[own[name]][key].copy_(value)
        else:
            nothing = {name: torch.zeros_like(mine[name]) for name in own.keys() - found.keys()}
            _give(job, found | nothing, lambda piece, key=key: optimizer.state[piece][key])
    for name, of in states.items():
        if not of:  # of what has had no gradient so far, the optimizer knows nothing
            optimizer.state.pop(own[name], None)
    job.changed()


def _give(job: Parallel, values: dict[str, Tensor], target: Callable[[Any], Tensor]) -> None:
    """Copy what is named by parameter, as the tensor group cuts it, into what pieces have of it."""
    if not job.sharded:
        for name, parameter in job.named_parameters():
            target(parameter).copy_(values[name])
        return
    for flat in job.flats:
        deal_out(flat, values, {n: target(p) for n, p in zip(flat.names, flat.pieces, strict=True)})


def _named(job: Parallel, mine: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    found = {}
    for name, tensor in mine.items():
        dimension, several = job.cuts[name], job.several[name]
        if 1 < mesh.size() != several and dimension is not None:
            tensor = joined(tensor, dimension, job.groups.tp, several=several)
        elif dimension is not None and mesh.size() > 1:
            tensor = DTensor.from_local(tensor.clone(), mesh, [Shard(dimension)], run_check=False)
        found[name] = tensor
    return found


def _local(job: Parallel, name: str, value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        return value.to_local()
    dimension, tp, several = job.cuts[name], job.groups.tp, job.several[name]
    if dimension is None or value.dim() == 0:
        return value
    return take(value, dimension, shard_slice(name, value.shape[dimension], tp, several))


# What is there, counted: beside what `predict` has.


def held(job: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of model states that are there, counted by storage, as `predicted_states` has them."""
    trained = list(job.parameters())
    plain = [part.module for part in job.sharded] or job.pipeline.parts
    # Of a model in shards: what it computes with, pieces.
    there = [*nn.ModuleList(plain).parameters(), *trained]
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": count.bytes_of(there),
        "gradients": count.bytes_of(p.grad for p in there if p.grad is not None),
        "optimizer": count.bytes_of(v for v in kept if isinstance(v, torch.Tensor) and v.dim()),
    }


def counted(sent: count.Sent, job: Parallel) -> dict[str, float]:
    """Bytes that left this rank along "tp", "pp" (twins among them) and "dp", of what was sent."""
    groups = {axis: {group} for axis, group in job.groups._asdict().items()}
    groups["pp"].add(job.pipeline.mail.back)  # with nccl, messages to lower stages have their own
    return {
        axis: sum(sent.within(group).leaving(group.size()) for group in several)
        for axis, several in groups.items()
    }
