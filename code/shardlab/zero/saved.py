"""A sharded model's tensors for `shardlab.checkpoint`: rows of each, by the plain module's names.

A rank's own pieces are stretches of a flat tensor, which no library can place in a parameter. So
one flat tensor at a time is gathered, and each rank keeps its rows of every parameter in it: with
these, a checkpoint is the same as that of `fully_shard` or of one process, and any of them reads
it. Beside its own N-th of everything a rank needs memory for one flat tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardlab.layout.boxes import Box, Piece, elements, shape, stretch
from shardlab.ranks.gather import gathered

from .flat import Flat, all_gather

if TYPE_CHECKING:
    from .wrapper import Sharded


@contextmanager
def checkpoint_tensors(
    model: Sharded, optimizer: torch.optim.Optimizer, to_load: bool
) -> Iterator[dict[str, Any]]:
    """Weights and the optimizer's states, as rows; buffers, scalars and frozen weights are whole.

    to_load: with states for all that the optimizer trains, which are gone again afterwards.
    Raises ValueError for an optimizer whose states are no numbers for each element.
    """
    pieces = dict(model.named_parameters())
    made = [p for p in pieces.values() if to_load and p not in optimizer.state]
    if to_load:
        _warm_up(model, optimizer)
    try:
        rows = _rows(model, pieces)
        own = model.module.state_dict(keep_vars=True)
        weights = {name: rows.get(model._names.get(t), t.detach()) for name, t in own.items()}
        known = _known(model, optimizer)
        states: dict[str, dict[str, Tensor]] = {name: {} for name in known}
        for key in sorted({key for of in known.values() for key in of}):
            values = {n: optimizer.state.get(pieces[n], {}).get(key) for n in known}
            for name, value in _rows(model, values).items():
                states[name][key] = value
        for name, of in known.items():
            states[name] |= {key: value for key, value in of.items() if value is not None}
        yield {"model": weights, "optimizer": states}
    finally:
        for piece in made:
            optimizer.state.pop(piece, None)


@torch.no_grad()
def restore(model: Sharded, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put such tensors, which a checkpoint has filled, into this rank's pieces."""
    pieces = dict(model.named_parameters())
    _warm_up(model, optimizer)
    for name, piece in pieces.items():
        if name not in state["optimizer"]:
            optimizer.state.pop(piece, None)
    _give(model, state["model"], pieces)  # a checkpoint fills what is whole in its place
    for key in sorted({key for of in state["optimizer"].values() for key in of}):
        values = {name: of[key] for name, of in state["optimizer"].items() if key in of}
        targets = {name: optimizer.state[pieces[name]][key] for name in values}
        _give(model, values, {name: t for name, t in targets.items() if t.dim()})
        for name, target in targets.items():
            if not target.dim():
                target.copy_(values[name])


def warm(pieces: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Have states for every piece: a step at rate 0 with gradients of 0 makes them, and no more."""
    pieces = list(pieces)
    if all(p in optimizer.state for p in pieces):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    before = {p: p.grad for p in pieces}
    steps = [v for s in optimizer.state.values() for v in s.values() if not v.dim()]
    made = float(steps[0]) if steps else 0.0
    for p in pieces:  # those that have states already take no part
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


def _warm_up(model: Sharded, optimizer: torch.optim.Optimizer) -> None:
    given = {p for group in optimizer.param_groups for p in group["params"]}
    warm([p for p in model.parameters() if p in given and p.requires_grad], optimizer)
    model.changed()  # it was a step: for one rank, for all


def _known(model: Sharded, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """By name, the states that any rank has: scalars themselves, None for one of each element.

    A rank without an element of a parameter steps nothing, and its counter stays behind.
    """
    mine: dict[str, dict[str, Any]] = {}
    wrong = None
    for name, piece in model.named_parameters():
        state = optimizer.state.get(piece, {}) if piece.numel() else {}
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dim() and value.shape != piece.shape:
                wrong = f"{key} of {name}"
            elif name in model.frozen or not value.dim():
                mine.setdefault(name, {})[key] = value.cpu()
            else:
                mine.setdefault(name, {})[key] = None
    everyone = gathered((mine, wrong), model.group)
    if problems := [problem for _, problem in everyone if problem]:
        text = (
            f"{problems[0]} is no number for each element; allowed are those with no other states"
        )
        raise ValueError(f"optimizer={type(optimizer).__name__}: {text}")
    return {name: of for states, _ in reversed(everyone) for name, of in states.items()}


def assembled(flat: Flat, values: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """By name, whole and in the masters' dtype, what pieces of a flat tensor have on all ranks.

    values: this rank's, one for each piece and of its shape; None stands for zeros. Every rank of
    the flat tensor's group calls it.
    """
    full = flat.empty(flat.master).zero_()
    for value, place in zip(values, flat.cut(full[flat.own]), strict=True):
        if place.numel() and value is not None:
            place.copy_(value.detach())
    all_gather(full, flat.own, flat.group).wait()
    return dict(zip(flat.names, flat.views(full), strict=True))


def deal_out(flat: Flat, values: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy what this rank owns of `values`, whole tensors or rows by name, into its `targets`."""
    full = flat.empty(flat.master)
    places = zip(flat.names, flat.views(full), flat.cut(full[flat.own]), strict=True)
    for name, view, part in places:
        if name in targets:
            value = values[name]
            view.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
            targets[name].copy_(part)


def pieces_of(flat: Flat, boxes: Mapping[str, Box]) -> Iterator[Piece]:
    """What this rank owns of a flat tensor; boxes: which part of a tensor each parameter is."""
    for name, piece, (first, last) in zip(flat.names, flat.pieces, flat.spans(), strict=True):
        end = 0
        for box in stretch(boxes[name], first, last):
            begin, end = end, end + elements(box)
            yield Piece(name, box, piece.detach()[begin:end].view(shape(box)))


def _rows(model: Sharded, values: Mapping[str, Tensor | None]) -> dict[str | None, Tensor]:
    """By name, this rank's rows of what its pieces have `values` of, on this rank or another."""
    found: dict[str | None, Tensor] = {}
    rank, size = dist.get_rank(model.group), dist.get_world_size(model.group)
    mesh = DeviceMesh.from_group(model.group, model.flats[0].device.type)
    for flat in model.flats:
        if values.keys().isdisjoint(flat.names):
            continue
        for name, view in assembled(flat, [values.get(name) for name in flat.names]).items():
            if name not in values:
                continue
            if not view.dim():
                found[name] = view.clone()
                continue
            chunks = view.chunk(size)  # some ranks may have none
            own = chunks[rank] if rank < len(chunks) else view[:0]
            full = {"shape": view.shape, "stride": view.stride()}
            local = own.clone()
            found[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **full)
    return found


def _give(model: Sharded, values: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy what this rank owns of `values`, rows by name, into its `targets`."""
    for flat in model.flats:
        if not targets.keys().isdisjoint(flat.names):
            deal_out(flat, values, targets)
