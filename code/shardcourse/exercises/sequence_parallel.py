"""Exercises of the lesson `sequence_parallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardcourse.exercises.forms import (
    Output,
    RankRecord,
    Trial,
    add_cases,
    add_number,
    add_trials,
    compute_gradients,
)
from shardlab.common.shapes import Config
from shardlab.gpt.model import GPT

_SBH, _T = 2048 * 12_288, 8
add_number("sequence_bytes", _SBH * 34 / _T, "bytes", rel_tol=0.001,
       success="Right: 34/8 bytes for each of the 2048 × 12,288 elements, 107 MB instead of 856.",
       hints={
    _SBH * (10 + 24 / _T): "That is tensor parallelism alone: the 10 of norms, dropout and "
    "inputs have to be divided, too.",
    _SBH * 34: "That is the whole layer: each rank keeps an eighth of everything.",
})  # fmt: skip


def _find_summands(names: list[str]) -> set[str]:
    """Return the replicated parameters that see only this rank's tokens."""
    suffixes = ("attention.out.bias", "ffn.down.bias")
    return {name for name in names if "norm." in name or name.endswith(suffixes)}


def _list_parameter_names() -> list[tuple[list[str]]]:
    small = {"vocab": 8, "seq": 4, "layers": 2, "heads": 2, "hidden": 8}
    llama = Config(**small, mlp="swiglu", norm="rms", bias=False, tied=False)
    models = [GPT(config) for config in (Config(**small), llama)]
    return [([name for name, _ in model.named_parameters()],) for model in models]


add_cases(
    "my_summands",
    _list_parameter_names,
    _find_summands,
    equal=lambda got, want: set(got) == want,
    success="Right: norms, and biases that are added behind the reduce-scatter.",
    mistakes={
        "A norm is replicated on every rank and has seen this rank's tokens alone.": lambda names: {
            name for name in _find_summands(names) if "norm." not in name
        },
        "Parameters that are added behind the reduce-scatter are missing.": lambda names: {
            name for name in _find_summands(names) if "norm." in name
        },
    },
)


_B, _SHARD, _H, _F = 2, 3, 4, 5


def _make_inputs(rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's token shard, its weight columns, and the gradient of its output."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (_B, _SHARD, _H), (_H, _F), (_B, size * _SHARD, _F)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


def _run_column_parallel(
    answer: Callable[..., Any], group: dist.ProcessGroup, size: int
) -> tuple[Any, ...]:
    """Return the output, both gradients, and the largest storage saved for backward in bytes."""
    x_BsH, w_HF, factor = _make_inputs(dist.get_rank(), size)
    kept = [0]

    def record_saved(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    with saved_tensors_hooks(record_saved, lambda x: x):
        found = compute_gradients(answer, (x_BsH, w_HF), factor, group)
    return *found, max(kept)


def _check_regather(records: list[RankRecord]) -> str:
    full = len(records) * _B * _SHARD * _H * 8
    asked = min(sum(record.traffic.calls.values()) + record.traffic.messages for record in records)
    if (
        max(record.extras[0] for record in records) < full and asked > 2
    ):  # one forward, two backward
        return ""
    return (
        "The values are right, but the gathered tensor is kept until backward. Keep the shard "
        "(ctx.save_for_backward(x_BsH, w_HF)), and gather once more in backward."
    )


@add_trials(
    "my_column",
    (2, 4),
    rank_fn=_run_column_parallel,
    rules=[_check_regather],
    success="Right on 2 and 4 ranks, and between forward and backward only the shard is kept.",
)
def _(size: int) -> Trial:
    x, w, factors = zip(*(_make_inputs(rank, size) for rank in range(size)), strict=True)
    full, mixed = torch.cat(x, 1), torch.cat(x).view(_B, size * _SHARD, _H)
    each = [f @ w_HF.T for f, w_HF in zip(factors, w, strict=True)]
    shards = [f.chunk(size, 1)[rank] for rank, f in enumerate(factors)]
    turned = {
        "An all-gather puts one rank's tensor behind the other's, whole batches: bring the tokens "
        "of one sequence together before reshaping (torch.cat(…, dim=1)).": [
            mixed @ one for one in w
        ]
    }
    alone = {
        "It is this rank's part alone: every rank has used these tokens, so the ranks' "
        "gradients add up.": [dx.chunk(size, 1)[rank] for rank, dx in enumerate(each)]
    }
    mine = {
        "It is the gradient of this rank's tokens alone: all tokens went through these columns.": [
            a.flatten(0, 1).T @ f.flatten(0, 1) for a, f in zip(x, shards, strict=True)
        ]
    }
    dw = [full.flatten(0, 1).T @ f.flatten(0, 1) for f in factors]
    # float64, sums of a few numbers of order 1
    parts = [
        Output("the output", [full @ one for one in w], turned, 1e-12),
        Output("the gradient of x_BsH", sum(each).chunk(size, 1), alone, 1e-12),
        Output("the gradient of w_HF", dw, mine, 1e-12),
    ]
    return Trial(parts, size=size)
