"""Exercises of the lesson `tensor_parallel`.

Shapes in names as everywhere; small letters are a rank's share: f of F, v of V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import (
    Output,
    Trial,
    add_cases,
    add_number,
    add_trials,
    call_answer,
    compute_gradients,
    limit_bytes,
    limit_calls,
)
from shardlab import ranks
from shardlab.common.shapes import PRESETS, Config

_TOLERANCE = 1e-5  # float32, values up to about 10, summed in another order

_H, _WIDTH, _T = 4096, 16384, 4
_MATRIX_PARAMS = 2 * _H * _WIDTH // _T
_ALL_PARAMS, _OWN_PARAMS = 2 * _H * _WIDTH + _WIDTH + _H, _MATRIX_PARAMS + _WIDTH // _T + _H
add_number("tp_bytes", 16 * _OWN_PARAMS, "bytes",
       success=f"Right: {16 * _OWN_PARAMS / 1e6:.0f} MB; the undivided bias is {16 * _H:,} bytes.",
       hints={
    16 * _ALL_PARAMS: "That is what one process holds.",
    16 * _ALL_PARAMS / _T: "Nearly: one of the biases is not divided. Which one is added to a sum "
    "that every rank has in full?",
})  # fmt: skip
add_number("tp_other_order", 8.5, "times", success="Right: (2 · 8 + 1) / 2, whatever t is.", hints={
    4.5: "That would be right with GELU; SwiGLU has two matrices that lead to the inner width.",
    8.0: "The inner sums are right. What does a rank have of Y in the end?",
})  # fmt: skip


def _make_network(size: int) -> dict[str, Tensor]:
    """Return a feed-forward network's weights, input and output gradient from a fixed seed."""
    generator = torch.Generator().manual_seed(size)
    shapes = {"x_BSH": (2, 3, 6), "up_FH": (8, 6), "up_bias_F": (8,), "down_HF": (6, 8)}
    shapes |= {"gate_FH": (8, 6), "bias_H": (6,), "dy_BSH": (2, 3, 6)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _shard_slice(rank: int, size: int) -> slice:
    shard = 8 // size
    return slice(rank * shard, (rank + 1) * shard)


def _compute_part(x_BSH: Tensor, up_fH: Tensor, up_bias_f: Tensor, down_Hf: Tensor) -> Tensor:
    """Return a rank's partial sum of the feed-forward output, without the last bias: [B, S, H]."""
    return F.gelu(x_BSH @ up_fH.T + up_bias_f) @ down_Hf.T  # [.., H] @ [H, f], [.., f] @ [f, H]


@add_exercise("my_ffn_shards")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        network = _make_network(size)
        weights = [network[name] for name in ("up_FH", "up_bias_F", "down_HF")]
        right, parts = [(8 // size, 6), (8 // size,), (6, 8 // size)], []
        for rank in range(size):
            words = f"For rank {rank} of {size} it"
            got = call_answer(answer, *weights, rank, size, subject=words)
            several = isinstance(got, (tuple, list))
            shapes = [tuple(getattr(part, "shape", ())) for part in got] if several else got
            if shapes != right:
                words += f" returned the shapes {shapes}; right are {right}."
                raise WrongAnswer(words + " Weights of nn.Linear are [out, in]: where is F?")
            parts.append(_compute_part(network["x_BSH"], *got))
        # Only the sum counts: an answer with the columns in another order is right as well.
        gap = (sum(parts) - _compute_part(network["x_BSH"], *weights)).abs().max().item()
        if not gap <= _TOLERANCE:
            alike = all(torch.equal(part, parts[0]) for part in parts)
            why = "All ranks have the same piece" if alike else "Columns and rows do not match"
            raise WrongAnswer(f"{why}: the sum over {size} ranks is off by up to {gap:.3g}.")
    return "Right: the parts of 2 and of 4 ranks add up to the whole network."


def _run_gated_ffn(
    answer: Callable[..., Any], group: dist.ProcessGroup, size: int
) -> tuple[Any, ...]:
    own = _shard_slice(dist.get_rank(), size)
    network = {name: tensor.to(ranks.device()) for name, tensor in _make_network(size).items()}
    gate, up, down = network["gate_FH"][own], network["up_FH"][own], network["down_HF"][:, own]
    given = network["x_BSH"], gate, up, down, network["bias_H"]
    y, dx, _, dup, _, dbias = compute_gradients(answer, given, network["dy_BSH"], group)
    return y, dx, dup, dbias


def _compute_gated_ffn(network: dict[str, Tensor], own: slice) -> list[Tensor]:
    """Return Y and the gradients of x and of up in one process, for the inner columns `own`."""
    x_BSH = network["x_BSH"].clone().requires_grad_()
    up_FH = network["up_FH"][own].clone().requires_grad_()
    inner = F.silu(x_BSH @ network["gate_FH"][own].T) * (x_BSH @ up_FH.T)
    y_BSH = inner @ network["down_HF"][:, own].T + network["bias_H"]
    y_BSH.backward(network["dy_BSH"])
    return [y_BSH.detach(), x_BSH.grad, up_FH.grad]


@add_trials(
    "my_gated_ffn",
    (2, 4),
    rank_fn=_run_gated_ffn,
    rules=[limit_calls(2, "let x enter once, for both matrices, and one sum leave.")],
    success="Right on 2 and on 4 ranks, with one all-reduce forward and one backward.",
)
def _(size: int) -> Trial:
    network = _make_network(size)
    bias_H, every = network["bias_H"], range(size)
    y, dx, dup = _compute_gated_ffn(network, slice(None))
    parts = [_compute_gated_ffn(network, _shard_slice(rank, size)) for rank in every]
    own = [dup[_shard_slice(rank, size)] for rank in every]
    of_y = {
        f"The bias was added {size} times: add it after the sum, once.": y + (size - 1) * bias_H,
        "The bias was not added.": y - bias_H,
        "Each rank has its own summand; they were not added up.": [part[0] for part in parts],
    }
    of_x = {
        "It is the rank's own gradient: nothing in front of the first matrices sums over "
        "the ranks in backward.": [part[1] for part in parts]
    }
    of_up = {
        f"It is {size} times too large: backward summed a gradient that all ranks had already. "
        "What does reduce_from do in backward?": [size * gradient for gradient in own]
    }
    found = [
        Output("Y", y, of_y, _TOLERANCE),
        Output("the gradient of x", dx, of_x, _TOLERANCE),
        Output("the gradient of up", own, of_up, _TOLERANCE),
        Output("the gradient of the bias", network["dy_BSH"].sum((0, 1)), {}, _TOLERANCE),
    ]
    return Trial(found, size=size)


def _split_heads(heads: int, kv_heads: int, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return the key/value heads that a rank holds, and the ranks that hold the same heads."""

    def list_heads(r: int) -> list[int]:
        query_heads = range(r * heads // size, (r + 1) * heads // size)
        return sorted({head * kv_heads // heads for head in query_heads})

    own = list_heads(rank)
    return own, [other for other in range(size) if list_heads(other) == own]


_SPLITS = ((8, 4, 2), (8, 4, 4), (8, 2, 4), (8, 1, 8), (12, 2, 4), (6, 3, 1))
add_cases(
    "my_kv_heads",
    [(heads, kv_heads, rank, size) for heads, kv_heads, size in _SPLITS for rank in range(size)],
    _split_heads,
    equal=lambda got, want: tuple(map(sorted, got)) == want,
    success="Right for 6 models: copies of a head stay equal when they add up.",
)


_TOKENS, _VOCAB_SHARD = (2, 3), 16  # tokens; vocabulary entries on each rank


def _make_logits(size: int, ties: bool) -> Tensor:
    """Return [B, S, V] negative logits; with `ties`, whole numbers, many of which are equal."""
    generator = torch.Generator().manual_seed(size + ties)
    if ties:
        return torch.randint(-4, 0, (*_TOKENS, size * _VOCAB_SHARD), generator=generator).float()
    return -torch.rand(*_TOKENS, size * _VOCAB_SHARD, generator=generator) - 1


@add_trials(
    "my_greedy",
    ((2, False), (2, True), (4, True)),
    rules=[
        limit_bytes(lambda n: 6 * 4 * _VOCAB_SHARD - 1, "do without sending logits.")  # 6 tokens
    ],
    success="Right on 2 and on 4 ranks, and no rank sends its logits.",
)
def _(size: int, ties: bool) -> Trial:
    logits_BSV = _make_logits(size, ties)
    parts = logits_BSV.chunk(size, -1)
    local = torch.stack([part.argmax(-1) for part in parts])
    numbers = local + _VOCAB_SHARD * torch.arange(size)[:, None, None]
    has_it = torch.stack([part.amax(-1) for part in parts]) == logits_BSV.amax(-1)
    mistakes = {
        "It is each rank's own likeliest entry: which rank has the largest logit of all?": list(
            numbers
        ),
        "It is a number in the rank's own part; entries of rank r begin at r v.": local.where(
            has_it, torch.tensor(size * _VOCAB_SHARD)
        ).amin(0),
    }
    part = Output("the tokens", logits_BSV.argmax(-1), mistakes)
    return Trial([part], [(own_BSv.contiguous(),) for own_BSv in parts])


_LLAMA = PRESETS["llama-3-8b"]
_SMALL = Config(vocab=49_152, seq=1024, layers=12, heads=12, hidden=1536)
add_cases(
    "my_degree",
    (  # model, bytes of memory, GPUs of a node; the right degree
        ((_LLAMA, 80e9, 8), 4, ""),
        ((_LLAMA, 55e9, 8), 4, "The peak is that of a GPU."),
        ((_SMALL, 3e9, 8), 3, ""),
        ((replace(_SMALL, kv_heads=4), 3e9, 8), 4, ""),
        ((_LLAMA, 40e9, 4), None, ""),
        ((PRESETS["gpt-2"], 2e9, 8), None, ""),
        ((_LLAMA, 24e9, 32), None, ""),
        ((replace(_SMALL, kv_heads=4, ffn=6150), 3e9, 8), None, ""),
    ),
    success="Right for 8 jobs; for some of them no degree will do.",
)
