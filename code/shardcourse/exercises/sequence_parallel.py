"""Exercises of the lesson `sequence_parallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardcourse.exercises.forms import (
    Part,
    Seen,
    Trial,
    cases,
    differentiate,
    number,
    on_ranks,
)
from shardlab.common.shapes import Config
from shardlab.gpt.model import GPT

_SBH, _T = 2048 * 12_288, 8
number("sequence_bytes", _SBH * 34 / _T, "bytes", rel=0.001,
       says="Right: 34/8 bytes for each of the 2048 × 12,288 elements, 107 MB instead of 856.",
       wrong={
    _SBH * (10 + 24 / _T): "That is tensor parallelism alone: the 10 of norms, dropout and "
    "inputs are to be divided, too.",
    _SBH * 34: "That is the whole layer: each rank keeps an eighth of everything.",
})  # fmt: skip


def _summands(names: list[str]) -> set[str]:
    """Return the replicated parameters that see only this rank's tokens."""
    late = ("attention.out.bias", "ffn.down.bias")
    return {name for name in names if "norm." in name or name.endswith(late)}


def _names() -> list[tuple[list[str]]]:
    """Return the parameter names of a GPT-2 model, and of a Llama model."""
    small = {"vocab": 8, "seq": 4, "layers": 2, "heads": 2, "hidden": 8}
    llama = Config(**small, mlp="swiglu", norm="rms", bias=False, tied=False)
    models = [GPT(config) for config in (Config(**small), llama)]
    return [([name for name, _ in model.named_parameters()],) for model in models]


cases(
    "my_summands",
    _names,
    _summands,
    equal=lambda got, want: set(got) == want,
    says="Right: norms, and biases that are added behind the reduce-scatter.",
    mistakes={
        "A norm is whole on every rank and has seen this rank's tokens alone.": lambda names: {
            name for name in _summands(names) if "norm." not in name
        },
        "What is added behind the reduce-scatter is missing.": lambda names: {
            name for name in _summands(names) if "norm." in name
        },
    },
)


_B, _SHARD, _H, _F = 2, 3, 4, 5


def _tokens(rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's token shard, its weight columns, and the gradient of its output."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (_B, _SHARD, _H), (_H, _F), (_B, size * _SHARD, _F)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


def _column(answer: Callable[..., Any], size: int) -> tuple[Any, ...]:
    """Return the output, both gradients, and the largest storage saved for backward in bytes."""
    x_BsH, w_HF, factor = _tokens(dist.get_rank(), size)
    kept = [0]

    def keep(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        found = differentiate(answer, (x_BsH, w_HF), factor)
    return *found, max(kept)


def _gathers_again(seen: list[Seen]) -> str:
    full = len(seen) * _B * _SHARD * _H * 8
    asked = min(sum(one.sent.calls.values()) + one.sent.messages for one in seen)
    if max(one.more[0] for one in seen) < full and asked > 2:  # one forward, two backward
        return ""
    return (
        "All of it is right, but what was gathered is kept until backward. Keep the share "
        "(ctx.save_for_backward(x_BsH, w_HF)), and gather once more in backward."
    )


@on_ranks(
    "my_column",
    (2, 4),
    work=_column,
    rules=[_gathers_again],
    says="Right on 2 and 4 ranks, and between forward and backward only the share is kept.",
)
def _(size: int) -> Trial:
    x, w, factors = zip(*(_tokens(rank, size) for rank in range(size)), strict=True)
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
        "It is this rank's part alone: every rank has used these tokens, and what they found for "
        "them adds up.": [dx.chunk(size, 1)[rank] for rank, dx in enumerate(each)]
    }
    mine = {
        "It is that of this rank's tokens alone: all tokens went through these columns.": [
            a.flatten(0, 1).T @ f.flatten(0, 1) for a, f in zip(x, shards, strict=True)
        ]
    }
    dw = [full.flatten(0, 1).T @ f.flatten(0, 1) for f in factors]
    # float64, sums of a few numbers of order 1
    parts = [
        Part("the output", [full @ one for one in w], turned, 1e-12),
        Part("the gradient of x_BsH", sum(each).chunk(size, 1), alone, 1e-12),
        Part("the gradient of w_HF", dw, mine, 1e-12),
    ]
    return Trial(parts, size=size)
