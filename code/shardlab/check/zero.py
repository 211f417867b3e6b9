"""The checks of lesson `zero`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import memory
from shardlab.check import Wrong, exercise, number, run_answer, same
from shardlab.layout import Layout


@exercise("zero_bytes")
def zero_bytes(answer: Any) -> str:
    """Bytes of states on a rank in stage 2."""
    params, size = 13e9, 32
    number(
        answer,
        params * (2 + 14 / size),
        "bytes",
        rel=0.001,
        hints={
            params * 16: "That is stage 0: every rank holds everything.",
            params * (4 + 12 / size): "That is stage 1: in stage 2 the gradients are sharded, too.",
            params * 16 / size: "That is stage 3: in stage 2 every rank holds all 16-bit weights.",
            params * (2 + 12 / size): "The optimizer is there, and the weights; where are this "
            "rank's gradients?",
            params * (2 + 14 / size) / 1e9: "In GB it is right; the answer is asked for in bytes.",
            params * (4 + 12 / size) / 1e9: "That is stage 1, and in GB.",
        },
    )
    return "Right: 2 bytes for the weights and 14/32 for all else, 31.7 GB on each rank."


_CUTS = ((8, 4), (10, 4), (9, 4), (5, 4), (3, 4), (7, 1), (1_000_003, 64))


@exercise("my_shard_bounds")
def shard_bounds(answer: Callable[[int, int, int], Any]) -> str:
    """Where a shard begins and ends, without its padding."""
    for elements, size in _CUTS:
        shard = math.ceil(elements / size)
        for rank in range(size):
            begin, end = min(rank * shard, elements), min((rank + 1) * shard, elements)
            asked = f"my_shard_bounds({elements}, {rank}, {size})"
            try:
                got = answer(elements, rank, size)
            except Exception as error:
                raise Wrong(f"{asked} raised {type(error).__name__}: {error}") from None
            if not isinstance(got, tuple) or len(got) != 2:
                raise Wrong(f"{asked} returned {got!r}; it should be a pair (begin, end).")
            if got == (begin, end):
                continue
            words = f"{asked} returned {got}."
            low = elements // size
            if got in ((rank * low, (rank + 1) * low), (rank * low, rank * low + low)):
                words += f" Rounded down, {elements - low * size} elements belong to nobody."
            elif rank == size - 1 and got == (rank * low, elements):
                words += " All shards have the same size: the collectives want that."
            elif got[1] > elements:
                words += f" There are only {elements} elements: the rest of the shard is padding."
            elif got[0] > got[1]:
                words += " The begin lies behind the end: this shard is padding and nothing else."
            raise Wrong(words)
    return f"Right, also where {_CUTS[-1][0]:,} elements are cut for {_CUTS[-1][1]} ranks."


_STEPS, _LR, _DECAY = 6, 0.01, 0.9
_ELEMENTS = 8


def _gradient(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(_ELEMENTS, generator=generator).bfloat16()


def _mixed(answer: Callable[..., Any]) -> Tensor:
    """What the answer leaves on this rank: all weights, then all masters, widened."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = torch.ones(_ELEMENTS, dtype=torch.bfloat16)
    master, moment = torch.ones(_ELEMENTS // size), torch.zeros(_ELEMENTS // size)
    for step in range(_STEPS):
        answer(weights, _gradient(rank, step), master, moment, _LR, _DECAY, dist.group.WORLD)
    masters = [torch.empty_like(master) for _ in range(size)]
    dist.all_gather(masters, master)
    return torch.cat([weights.float(), *masters])


def _alone(
    size: int,
    share: float | None = None,
    decay: float = _DECAY,
    narrow_sum: bool = False,
    narrow_step: bool = False,
    only: int | None = None,
) -> Tensor:
    """The same from one process, with a mistake: another factor than 1/N, momentum that is
    forgotten, a sum or a step in bfloat16; only: with the gradients of one rank."""
    master, moment = torch.ones(_ELEMENTS), torch.zeros(_ELEMENTS)
    weights = master.bfloat16()
    for step in range(_STEPS):
        gradients = [_gradient(r, step) for r in range(size) if only in (None, r)]
        total = sum(g if narrow_sum else g.float() for g in gradients)
        factor = share or 1 / size
        moment = decay * moment + (total * factor).float()
        if narrow_step:
            weights = weights - (_LR * moment).bfloat16()
        else:
            master = master - _LR * moment
            weights = master.bfloat16()
    return torch.cat([weights.float(), master])


def _own_weights_only(right: Tensor, rank: int, size: int) -> Tensor:
    """`right`, but this rank knows nobody else's new weights."""
    shard = _ELEMENTS // size
    found = right.clone()
    others = [i for i in range(_ELEMENTS) if i // shard != rank]
    found[others] = 1.0
    return found


@exercise("my_mixed_step")
def mixed_step(answer: Callable[..., Any]) -> str:
    """A step of stage 1 with master weights, six times, on 2 and 4 ranks."""
    for size in (2, 4):
        right = _alone(size)
        local = torch.stack([_alone(size, 1.0, only=rank) for rank in range(size)])
        owner = torch.arange(_ELEMENTS) // (_ELEMENTS // size)
        own_gradients = local[owner.repeat(2), torch.arange(2 * _ELEMENTS)]
        results = run_answer(_mixed, size, answer, timeout=10)
        if all(isinstance(r, Tensor) and r.shape == right.shape for r in results):
            results = [_snapped(r, right) for r in results]
        mistakes = {
            "Nothing has changed: weights, master and moment are to be changed in place "
            "(`weights[own] = …`, `master -= …`).": [torch.ones(2 * _ELEMENTS)] * size,
            "The masters are right, and each rank has put its own into the weights; nobody has the "
            "others'.": [_own_weights_only(right, rank, size) for rank in range(size)],
            "The masters are right, and never get into the weights.": [
                torch.cat([torch.ones(_ELEMENTS), right[_ELEMENTS:]])
            ]
            * size,
            "The step was made on the bfloat16 weights, where small steps round away; it belongs "
            "to the master.": [_alone(size, narrow_step=True)] * size,
            "The gradients were added up in bfloat16: widen them first (`gradient.float()`).": [
                _alone(size, narrow_sum=True)
            ]
            * size,
            f"The gradients were summed over {size} ranks, not averaged.": [_alone(size, 1.0)]
            * size,
            "The gradients were not averaged at all: each shard was stepped with its owner's "
            "gradient alone.": [own_gradients] * size,
            "Momentum does not carry over from step to step: write it back into `moment`, in "
            "place (`moment.mul_(…)`, not `moment = …`).": [_alone(size, decay=0.0)] * size,
        }
        same(
            results,
            [right] * size,
            "a weight or a master",
            1e-5,  # float32, values around 1: the order of four additions, six times
            {words: [_snapped(x, right) for x in wrong] for words, wrong in mistakes.items()},
        )
    return (
        f"Right: after {_STEPS} steps masters and weights are those of one process on 2 and 4 "
        "ranks, with an N-th of masters and momentum on each."
    )


def _snapped(found: Tensor, right: Tensor) -> Tensor:
    """`found`, in which weights that may be the rounded master count as right.

    A master that is 1e-7 off may round to the neighbour in bfloat16, 2^-8 away below 1, 2^-7 above.
    """
    weights, (wanted, masters) = found[:_ELEMENTS], right.chunk(2)
    beside = ((masters - weights).abs() < 2**-8 + 1e-5) & ((weights - wanted).abs() <= 2**-7)
    return torch.cat([torch.where(beside, wanted, weights), found[_ELEMENTS:]])


def _shards(rank: int) -> list[Tensor | None]:
    """Gradients of a rank's pieces: none at all on rank 1, one of them missing elsewhere."""
    generator = torch.Generator().manual_seed(rank)
    if rank == 1:
        return [None, None]
    return [torch.randn(3 + rank, generator=generator), None, torch.randn(2, generator=generator)]


def _global_norm(answer: Callable[..., Any]) -> Tensor:
    value = answer(_shards(dist.get_rank()), dist.group.WORLD)
    if isinstance(value, (int, float)):
        value = torch.tensor(float(value))
    return value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else value


@exercise("my_global_norm")
def global_norm(answer: Callable[..., Any]) -> str:
    """The norm of gradients of which each rank has some pieces."""
    for size in (2, 4):
        results = run_answer(_global_norm, size, answer, timeout=10)
        squares = [
            sum((g.square().sum() for g in _shards(rank) if g is not None), torch.tensor(0.0))
            for rank in range(size)
        ]
        total = torch.stack(squares).sum()
        same(
            results,
            [total.sqrt()] * size,
            "the norm",
            1e-5,  # float32, values up to about 10
            {
                "It is the norm of this rank's own pieces.": [s.sqrt() for s in squares],
                "It is the sum of the ranks' norms; squares are what adds up.": [
                    torch.stack([s.sqrt() for s in squares]).sum()
                ]
                * size,
                "It is the square of the norm.": [total] * size,
                "It is the root of the mean over ranks: the ranks' squares are to be summed.": [
                    (total / size).sqrt()
                ]
                * size,
            },
        )
    return "Right on 2 and 4 ranks, one of which owns no gradient at all."


# Parameters, bytes of activations, ranks, bytes of memory on each.
_JOBS = (
    (1e9, 10e9, 8, 80e9),
    (7e9, 10e9, 8, 80e9),
    (7e9, 10e9, 8, 40e9),
    (7e9, 10e9, 8, 24e9),
    (7e9, 10e9, 8, 16e9),
    (7e9, 10e9, 8, 15e9),
    (70e9, 20e9, 64, 80e9),
    (70e9, 20e9, 8, 80e9),
    (13e9, 30e9, 64, 64e9),
)


def _smallest(
    params: float, activations: float, ranks: int, limit: float, optimizer: str = "adamw"
) -> int | None:
    for stage in range(4):
        states = memory.states(params, Layout(dp=ranks, zero=stage), "bf16", optimizer).total
        if states + activations <= limit:
            return stage
    return None


@exercise("my_stage")
def lowest_stage(answer: Callable[..., Any]) -> str:
    """The lowest stage that fits a job into memory."""
    got = []
    for job in _JOBS:
        try:
            got.append(answer(*job))
        except Exception as error:
            raise Wrong(f"my_stage{job} raised {type(error).__name__}: {error}") from None
    want = [_smallest(*job) for job in _JOBS]
    if got == want:
        return f"Right for {len(want)} jobs, some of which fit in no stage."
    if all(stage is None for stage in got):
        raise Wrong("It returned None every time; for the first job stage 0 is enough.")
    first = next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
    params, activations, ranks, limit = _JOBS[first]
    job = (
        f"{params / 1e9:.0f} billion parameters, {activations / 1e9:.0f} GB of activations, "
        f"{ranks} ranks of {limit / 1e9:.0f} GB"
    )
    words = f"For {job} it returned {got[first]!r}."
    if got == [_smallest(p, 0, n, m) for p, _, n, m in _JOBS]:
        words += " That leaves out the activations: they are held beside the states."
    elif got == [_smallest(p, a / n, n, m) for p, a, n, m in _JOBS]:
        words += " No stage divides activations: each rank has those of its own batch."
    elif want[first] is None:
        words += " Does stage 3 fit?"
    elif isinstance(got[first], int) and got[first] > want[first]:
        words += " A smaller stage fits as well, and keeps more of the speed."
    raise Wrong(words)
