"""Exercises of the lesson `model_parallelism`.

Shapes in names as everywhere; small letters are a rank's share: f of F.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcourse.exercises import add_exercise
from shardcourse.exercises.forms import Output, Trial, add_cases, add_number, add_trials
from shardcourse.exercises.strategy import check_layout
from shardlab import ranks
from shardlab.common.shapes import PRESETS
from shardtools.strategy import MACHINES

_TOLERANCE = 2e-4  # float32, values up to about 100, summed in another order

_PARAMS, _N = 7e9, 16
add_number("zero_states", _PARAMS * (2 + 14 / _N), "bytes", rel_tol=1e-6,
       success="Right: 20.1 GB instead of 112; the weights' 14 GB stay with any number of GPUs.",
       hints={
    _PARAMS * 16: "Those are all states, as without ZeRO. Which of them does stage 2 divide?",
    _PARAMS: "That divides the weights as well, which is stage 3.",
})  # fmt: skip

_REDUCE_SCATTER_BYTES = 7 / 8 * 7e9 * 2
add_number("gradient_traffic", 2 * _REDUCE_SCATTER_BYTES, "bytes", rel_tol=1e-6,
       success="Right: 24.5 GB; with 1,000 GPUs it would be 28, and never more.", hints={
    14e9: "Those are the gradients. How often does each piece of them travel?",
    28e9: "Nearly: a GPU never sends all of the pieces, but (N−1)/N of them.",
})  # fmt: skip


def _count_microbatches(p: int, percent: int) -> int:
    return max(1, -(-percent * (p - 1) // (100 - percent)))


add_cases(
    "my_busy_microbatches",
    ((4, 50), (4, 75), (4, 90), (8, 90), (8, 80), (2, 99), (64, 95), (1, 90), (3, 67)),
    _count_microbatches,
    success="Right: 4 stages need 9 micro-batches to be 75 % busy, and 27 for 90 %.",
    mistakes={
        "That makes (p−1)/m the idle share; but the idle time is a share of the whole step, "
        "m + p − 1 long.": lambda p, q: max(1, math.ceil(100 * (p - 1) / (100 - q))),
        "That makes (p−1)/m the idle share, with floats; but the idle time is a share of the whole "
        "step, m + p − 1 long.": lambda p, q: max(1, math.ceil((p - 1) / (1 - q / 100))),
        "With p micro-batches a stage is busy for p/(2p−1) of the step, just over a half, whatever "
        "`percent` is.": lambda p, q: p,
    },
)

add_number("gpus_needed", 24, "GPUs",
       success="Right: 19 would be enough, and 24 leave 15 GB free on each.", hints={
    16: "1,120 GB / 16 are 70 GB on each GPU; do the other 10 fit beside it?",
    14: "That gives all 80 GB of each GPU to states alone.",
    19: "19 would be enough. They come in whole nodes of 8.",
})  # fmt: skip


def _predict_traffic(params: int, d: int, m: int, keeps_own_shard: bool = True) -> list[float]:
    once = 2 * params * ((d - 1) / d if keeps_own_shard else 1)
    return [2 * once, 2 * once, (m + 1) * once, 3 * m * once]


def _is_close(a: Any, b: Any) -> bool:
    return all(math.isclose(x, y, rel_tol=1e-9) for x, y in zip(a, b, strict=True))


add_cases(
    "my_zero_traffic",
    ((8_000, 2, 1), (8_000, 2, 8), (1_000_000, 4, 32), (5_455_000_000, 2, 256), (640, 64, 4)),
    _predict_traffic,
    equal=_is_close,
    success="Right: stages 0 and 1 send the same, and m micro-batches multiply 2 and 3.",
    mistakes={
        "A rank keeps its own share: (d−1)/d of everything travels.": partial(
            _predict_traffic, keeps_own_shard=False
        )
    },
)

_SEQUENCES, _INPUTS, _OUTPUTS = 3, 5, 4


def _make_grid_inputs(copies: int, shards: int) -> tuple[Tensor, Tensor]:
    """Return x_CBH, the inputs of every copy, and w_FH, the unsharded weights."""
    generator = torch.Generator().manual_seed(copies)
    x_CBH = torch.randn(copies, _SEQUENCES, _INPUTS, generator=generator)
    return x_CBH, torch.randn(_OUTPUTS * shards, _INPUTS, generator=generator)


def _run_on_grid(answer: Callable[..., Any], _: dist.ProcessGroup, copies: int, shards: int) -> Any:
    copy, shard = divmod(dist.get_rank(), shards)
    tensor_group = data_group = None
    for c in range(copies):  # every rank creates all groups, in the same order
        group = dist.new_group([c * shards + s for s in range(shards)])
        tensor_group = group if c == copy else tensor_group
    for s in range(shards):
        group = dist.new_group([c * shards + s for c in range(copies)])
        data_group = group if s == shard else data_group
    x_CBH, w_FH = (tensor.to(ranks.device()) for tensor in _make_grid_inputs(copies, shards))
    w_fH = w_FH.chunk(shards)[shard].clone()
    return answer(x_CBH[copy].clone(), w_fH, tensor_group, data_group)


@add_trials(
    "my_grid_step",
    ((2, 2), (1, 2)),
    rank_fn=_run_on_grid,
    success="Right on two copies of two shards, and on one, as one process computes it.",
)
def _(copies: int, shards: int) -> Trial:
    x_CBH, w_FH = _make_grid_inputs(copies, shards)
    # Indexed by copy and shard: each rank's own loss and gradient, over its copy's sequences.
    y = [[x @ w.T for w in w_FH.chunk(shards)] for x in x_CBH]
    own = torch.tensor([[(part**2).sum() / 2 / _SEQUENCES for part in row] for row in y])
    ours = [[part.T @ x / _SEQUENCES for part in row] for row, x in zip(y, x_CBH, strict=True)]
    places = [divmod(rank, shards) for rank in range(copies * shards)]
    losses = {
        "Each rank returned the loss of its own part: nothing was added up.": [
            own[c, s] for c, s in places
        ],
        "The copies' losses were added up, not averaged: each is over its own sequences.": (
            own.sum()
        ),
    }
    shard = [torch.stack([row[s] for row in ours]).mean(0) for s in range(shards)]
    gradients = {
        "The tensor group's ranks hold different rows: adding them up makes no sense.": [
            sum(ours[c]) for c, _ in places
        ],
        "The copies' gradients were added up, not averaged.": [
            copies * shard[s] for _, s in places
        ],
    }
    parts = [
        Output("the loss", own.sum(1).mean(), losses, _TOLERANCE),
        Output("the gradient", [shard[s] for _, s in places], gradients, _TOLERANCE),
    ]
    return Trial(parts, size=copies * shards)


_MODEL, _GPU = PRESETS["llama-3-70b"], MACHINES["h200"]
_GPUS, _BATCH, _MAX_SECONDS = 64, 512, 71.0  # _MAX_SECONDS in seconds


@add_exercise("my_layout")
def _check_layout(answer: Any) -> str:
    return check_layout(answer, _MODEL, _GPU, _GPUS, _BATCH, _MAX_SECONDS)
