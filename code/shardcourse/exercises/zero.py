"""Exercises of the lesson `zero`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcourse.exercises.forms import Output, Trial, add_cases, add_number, add_trials
from shardlab import memory
from shardlab.layout import Layout

_PARAMS, _RANKS = 13e9, 32
add_number("zero_bytes", _PARAMS * (2 + 14 / _RANKS), "bytes", rel_tol=0.001,
       success="Right: 2 bytes for weights and 14/32 for the rest, 31.7 GB on each rank.", hints={
    _PARAMS * 16: "That is stage 0: every rank holds everything.",
    _PARAMS * (4 + 12 / _RANKS): "That is stage 1: in stage 2 the gradients are sharded, too.",
})  # fmt: skip


def _compute_bounds(elements: int, rank: int, size: int) -> tuple[int, int]:
    shard = -(-elements // size)
    return min(rank * shard, elements), min((rank + 1) * shard, elements)


add_cases(
    "my_shard_bounds",
    [
        (elements, rank, size)
        for elements, size in ((8, 4), (10, 4), (9, 4), (5, 4), (3, 4), (7, 1), (1_000_003, 64))
        for rank in range(size)
    ],
    _compute_bounds,
    equal=lambda got, want: tuple(got) == want,
    success="Right, also where 1,000,003 elements are cut for 64 ranks.",
    mistakes={
        "Rounded down, the elements that are left over belong to no rank.": (
            lambda n, rank, size: (rank * (n // size), (rank + 1) * (n // size))
        ),
        "The begin is greater than the end: such a shard is only padding.": (
            lambda n, rank, size: (rank * -(-n // size), min((rank + 1) * -(-n // size), n))
        ),
    },
)

_STEPS, _LR, _DECAY = 6, 0.01, 0.9
_ELEMENTS = 8


def _make_grad(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(_ELEMENTS, generator=generator).bfloat16()


def _run_mixed_steps(answer: Callable[..., Any], group: dist.ProcessGroup, size: int) -> Tensor:
    """Return the weights and all ranks' masters that the answer leaves on this rank, in float32."""
    weights = torch.ones(_ELEMENTS, dtype=torch.bfloat16)
    master, moment = torch.ones(_ELEMENTS // size), torch.zeros(_ELEMENTS // size)
    for step in range(_STEPS):
        gradient = _make_grad(dist.get_rank(), step)
        answer(weights, gradient, master, moment, _LR, _DECAY, group)
    masters = [torch.empty_like(master) for _ in range(size)]
    dist.all_gather(masters, master, group)
    return _accept_rounding(torch.cat([weights.float(), *masters]), _train_alone(size))


def _train_alone(size: int, scale: float | None = None, rebinds: bool = False) -> Tensor:
    """Return the same tensor from one process; `scale` replaces 1/N, and with `rebinds` the new
    master tensor is lost after the step."""
    master, moment = torch.ones(_ELEMENTS), torch.zeros(_ELEMENTS)
    weights = master.bfloat16()
    for step in range(_STEPS):
        total = sum(_make_grad(rank, step).float() for rank in range(size))
        moment = _DECAY * moment + (total * (scale or 1 / size)).float()
        stepped = master - _LR * moment
        weights = stepped.bfloat16()
        master = master if rebinds else stepped
    return torch.cat([weights.float(), master])


def _accept_rounding(found: Tensor, right: Tensor) -> Tensor:
    """Return `found`, in which weights that may be the rounded master count as right.

    A master that is 1e-7 off may round to the neighbour in bfloat16, 2^-8 away below 1, 2^-7 above.
    """
    weights, (wanted, masters) = found[:_ELEMENTS], right.chunk(2)
    is_neighbour = ((masters - weights).abs() < 2**-8 + 1e-5) & ((weights - wanted).abs() <= 2**-7)
    return torch.cat([torch.where(is_neighbour, wanted, weights), found[_ELEMENTS:]])


@add_trials(
    "my_mixed_step",
    (2, 4),
    rank_fn=_run_mixed_steps,
    success=f"Right: after {_STEPS} steps masters and weights are those of one process on 2 and 4 "
    "ranks, with an N-th of masters and momentum on each.",
)
def _(size: int) -> Trial:
    right = _train_alone(size)
    mistakes = {
        "The weights have changed, and `master` has not: `master = …` binds the name to a new "
        "tensor, which is lost after the step. Change it in place: `master -= …`.": _train_alone(
            size, rebinds=True
        ),
        f"The gradients were summed over {size} ranks, not averaged.": _train_alone(size, 1.0),
    }
    accepted = {words: _accept_rounding(wrong, right) for words, wrong in mistakes.items()}
    # float32, values around 1: four additions in any order, six times
    return Trial([Output("a weight or a master", right, accepted, 1e-5)], size=size)


def _make_shard_gradients(rank: int) -> list[Tensor | None]:
    """Return the gradients of a rank's pieces: none on rank 1, and one missing on other ranks."""
    generator = torch.Generator().manual_seed(rank)
    if rank == 1:
        return [None, None]
    return [torch.randn(3 + rank, generator=generator), None, torch.randn(2, generator=generator)]


@add_trials(
    "my_global_norm",
    (2, 4),
    success="Right on 2 and 4 ranks, one of which owns no gradient at all.",
)
def _(size: int) -> Trial:
    given = [_make_shard_gradients(rank) for rank in range(size)]
    flat = [torch.cat([torch.zeros(1), *(g for g in one if g is not None)]) for one in given]
    squares = torch.stack([x @ x for x in flat])
    total = squares.sum()
    mistakes = {
        "It is the norm of this rank's own pieces.": list(squares.sqrt()),
        "It is the sum of the ranks' norms; add up the squares.": squares.sqrt().sum(),
    }
    # float32, values up to about 10
    return Trial([Output("the norm", total.sqrt(), mistakes, 1e-5)], [(one,) for one in given])


def _find_smallest_stage(
    params: float, activations: float, ranks: int, limit: float, activation_factor: float = 1.0
) -> int | None:
    """Return the smallest stage that fits; hidden: factor of the activations in a known mistake."""
    for stage in range(4):
        states = memory.estimate_states(params, Layout(dp=ranks, zero=stage)).total
        if states + activation_factor * activations <= limit:
            return stage
    return None


# Parameters, bytes of activations, ranks, bytes of memory on each rank.
_JOBS = ((1e9, 10e9, 8, 80e9), (7e9, 10e9, 8, 80e9), (7e9, 10e9, 8, 40e9), (7e9, 10e9, 8, 24e9))
_JOBS += ((7e9, 10e9, 8, 16e9), (7e9, 10e9, 8, 15e9), (70e9, 20e9, 64, 80e9))
_JOBS += ((70e9, 20e9, 8, 80e9), (13e9, 30e9, 64, 64e9))
add_cases(
    "my_stage",
    _JOBS,
    _find_smallest_stage,
    success="Right for 9 jobs, some of which fit in no stage.",
    mistakes={
        "That leaves out the activations, which are held beside the states.": (
            lambda *job: _find_smallest_stage(*job, activation_factor=0)
        ),
        "No stage divides activations: each rank has its own batch's.": (
            lambda *job: _find_smallest_stage(*job, activation_factor=1 / job[2])
        ),
    },
)
