"""What no mesh can train; what each rank holds and sends, by formula: exact, padding included.

For a rank of stage i, with P elements there after tensor parallelism has cut them, over d copies:

    held           parameters   gradients   optimizer (AdamW)
    no ZeRO        4P           4P          8P
    ZeRO-1         4P           4P          8P/d
    ZeRO-2         4P           4P/d        8P/d
    ZeRO-3         4P/d         4P/d        8P/d

    sent           along        bytes in a step, of B sequences of S tokens in this copy
    tensor         tp           4 all-reduces of 4BSH for each layer, and those at the ends
    pipeline       pp           4BSH to the next stage, 4BSH back; between the ends the tied twin
    data           dp           an all-reduce of 4P, or ZeRO's halves of it

Everything is float32. Shapes: B sequences of a copy, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardlab import count, tensor_parallel
from shardlab.arguments import (
    check_count,
    check_flag,
    check_kind,
    check_one_of,
    check_whole,
    given,
    told,
)
from shardlab.buckets import MIB, deal
from shardlab.memory import counting
from shardlab.shapes import Config

from .layout import Mesh

if TYPE_CHECKING:
    from .core import Parallel

SCHEDULES = "gpipe", "1f1b"  # one part on each stage, and whole backwards
ITEM = 4  # bytes


def check_cuts(
    config: Config, mesh: Mesh, schedule: object, zero: int = 0, seq: int | None = None
) -> None:
    """Raise ValueError for what a mesh cannot train; `seq`: with sequence parallelism, its tokens.

    schedule: a Schedule, or the name of one.
    """
    check_kind(Mesh, mesh=mesh)
    tensor_parallel.predict.check_degree(config, mesh.tp)
    if config.layers % mesh.pp:
        raise ValueError(f"pp={mesh.pp}: allowed are divisors of layers={config.layers}")
    name = getattr(schedule, "name", schedule)
    if name not in SCHEDULES:
        raise ValueError(f"schedule={told(name)}: allowed are {' and '.join(SCHEDULES)}")
    stages = getattr(schedule, "stages", mesh.pp)
    if stages != mesh.pp:
        raise ValueError(f"schedule has {stages} stages: allowed are {mesh.pp}, one for each rank")
    check_one_of(range(4), zero=zero)
    if zero > 1 and mesh.pp > 1:
        raise ValueError(
            f"zero={zero} with pp={mesh.pp}: allowed are 0 and 1, since each micro-batch would "
            "send all gradients anew; 2 and 3 with pp=1"
        )
    check_whole(**given(seq=seq))
    if seq is not None and seq % mesh.tp:
        raise ValueError(f"seq={seq}: allowed with sequence parallelism are multiples of {mesh.tp}")


@dataclass(frozen=True)
class Shared:
    """Parameters that ZeRO puts side by side: names, elements, and what each copy owns of them."""

    elements: dict[str, int]
    copies: int
    rest: bool = False  # in stage 3: whole from the beginning of forward to the end of backward

    @property
    def shard(self) -> int:
        """Elements of a shard, padding included."""
        return -(-sum(self.elements.values()) // self.copies)

    @property
    def padded(self) -> int:
        """Elements of all shards."""
        return self.shard * self.copies

    def own(self, copy: int) -> dict[str, int]:
        """Elements of each parameter in the shard of `copy`."""
        low, high, end, found = copy * self.shard, (copy + 1) * self.shard, 0, {}
        for name, size in self.elements.items():
            begin, end = end, end + size
            found[name] = max(0, min(end, high) - max(begin, low))
        return found


def shared(config: Config, mesh: Mesh, stage: int, zero: int) -> list[Shared]:
    """How a stage's parameters are dealt: without ZeRO each one alone, on every copy whole."""
    shapes = counting.shapes(config, mesh.tp, mesh.pp, stage)
    elements = {name: prod(shape) for name, shape in shapes.items()}
    if zero == 0:
        return [Shared({name: size}, 1) for name, size in elements.items()]
    if zero == 3:
        blocks: dict[str, dict[str, int]] = {}
        for name, size in elements.items():
            unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "rest"
            blocks.setdefault(unit, {})[name] = size
        return [Shared(inside, mesh.dp, unit == "rest") for unit, inside in blocks.items()]
    tensors = {name: torch.empty(size, device="meta") for name, size in elements.items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    buckets = deal(reversed(tensors.values()), 25 * MIB, MIB)  # as Zero1 does
    return [Shared({names[id(t)]: t.numel() for t in bucket}, mesh.dp) for bucket in buckets]


def _check(config: Config, mesh: Mesh, zero: int) -> None:
    check_kind(Config, config=config)
    check_kind(Mesh, mesh=mesh)
    check_one_of(range(4), zero=zero)


def predicted_states(config: Config, mesh: Mesh, rank: int, zero: int = 0) -> dict[str, int]:
    """Bytes of model states on `rank` after a step with AdamW: parameters, gradients, optimizer."""
    _check(config, mesh, zero)
    place = mesh.place(rank)
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for flat in shared(config, mesh, place["pp"], zero):
        copy = place["dp"] if zero else 0
        found["parameters"] += ITEM * (flat.shard if zero == 3 else flat.padded)
        found["gradients"] += ITEM * (flat.shard if zero > 1 else flat.padded)
        found["optimizer"] += 2 * ITEM * sum(flat.own(copy).values())
    return found


def predicted_sent(
    config: Config,
    mesh: Mesh,
    rank: int,
    batch: int,
    seq: int,
    microbatches: int = 1,
    zero: int = 0,
    sequence: bool = False,
) -> dict[str, float]:
    """Bytes that leave `rank` in one `Parallel.step`, along "tp", "pp", "dp", and to its "twin".

    batch: sequences of a copy, `seq` tokens each. Collectives as rings send them: an all-reduce of
    S bytes 2(n-1)/n S, its halves (n-1)/n S. Of numbers there are some: the batch's size (8 bytes)
    and the loss (4) along dp, the loss along pp; with ZeRO a byte for each parameter.
    """
    _check(config, mesh, zero)
    check_whole(batch=batch, seq=seq)
    check_count(microbatches=microbatches)
    check_flag(sequence=sequence)
    place, (d, p, t) = mesh.place(rank), (mesh.dp, mesh.pp, mesh.tp)
    first, last = place["pp"] == 0, place["pp"] == p - 1
    flats = shared(config, mesh, place["pp"], zero)
    stream = ITEM * batch * seq * config.hidden  # [B, S, H]
    half = (t - 1) / t * stream
    enters = leaves = 2 * config.layers // p
    enters, leaves = enters + last, leaves + first
    tensor = 2 * half * (enters + leaves) + 2 * (t - 1) / t * last * 3 * ITEM * batch * seq
    if sequence:
        tensor += half * enters  # gathered once more in backward
        copy = place["dp"] if zero else 0
        partly = sum(
            size
            for flat in flats
            for name, size in flat.own(copy).items()
            if "norm" in name or name.endswith(("out.bias", "down.bias"))
        )
        tensor += 2 * (t - 1) / t * ITEM * partly
    ways = (not first) + (not last)
    along = {
        "tp": tensor if t > 1 else 0.0,
        "pp": ways * stream / (t if sequence else 1) + 2 * (p - 1) / p * ITEM,
        "twin": float(ITEM * config.vocab // t * config.hidden),
    }
    if not config.tied or p == 1 or not (first or last):
        along["twin"] = 0.0
    others = sum(ITEM * (flat.padded - flat.shard) for flat in flats)
    if zero == 0:
        data = 2 * (d - 1) / d * sum(ITEM * flat.padded for flat in flats)
    else:
        sends = microbatches if zero > 1 else 1
        data = sends * (others + 2 * (d - 1) / d * sum(len(flat.elements) for flat in flats))
        gathers = 0
        for flat in flats:
            times = microbatches * (1 if flat.rest else 2) if zero == 3 else 1
            gathers += times * ITEM * (flat.padded - flat.shard)
        data += gathers
    along["dp"] = (data + 2 * (d - 1) / d * (8 + ITEM)) if d > 1 else 0.0
    return along


def check_job(job: Parallel) -> None:
    """Raise ValueError for what is no `Parallel`."""
    from .core import Parallel

    check_kind(Parallel, job=job)


def held(job: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of model states that are there, counted by storage, as `predicted_states` has them."""
    check_job(job)
    check_kind(torch.optim.Optimizer, optimizer=optimizer)
    trained = list(job.parameters())
    plain = job.sharded.module if job.sharded else nn.ModuleList(job.pipeline.parts)
    there = [*plain.parameters(), *trained]  # of a model in shards: what it computes with, pieces
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": count.bytes_of(there),
        "gradients": count.bytes_of(p.grad for p in there if p.grad is not None),
        "optimizer": count.bytes_of(v for v in kept if isinstance(v, torch.Tensor) and v.dim()),
    }


def counted(sent: count.Sent, job: Parallel) -> dict[str, float]:
    """Bytes that left this rank along "tp", "pp" (twins among them) and "dp", of what was sent."""
    check_kind(count.Sent, sent=sent)
    check_job(job)
    groups = {axis: {group} for axis, group in job.groups._asdict().items()}
    groups["pp"].add(job.pipeline.mail.back)  # with nccl, messages to lower stages have their own
    return {
        axis: sum(sent.within(group).leaving(group.size()) for group in several)
        for axis, several in groups.items()
    }
