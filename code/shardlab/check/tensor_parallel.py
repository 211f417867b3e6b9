"""The checks of lesson `tensor_parallel`.

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

from shardlab import count, memory, ranks
from shardlab.check import Wrong, exercise, number, run_answer, same
from shardlab.layout import Layout
from shardlab.shapes import PRESETS, Config

_TIMEOUT = 10.0  # seconds, for what takes milliseconds: who waits that long waits for ever
_TOLERANCE = 1e-5  # float32, values up to about 10, sums made in another order


@exercise("tp_bytes")
def _(answer: Any) -> str:
    h, width, t = 4096, 16384, 4
    matrices = 2 * h * width // t
    right = matrices + width // t + h
    hints = {
        16 * (2 * h * width + width + h): "That is what one process holds.",
        16 * (2 * h * width + width + h) / t: "Nearly: one of the biases is not divided. Which one "
        "is added to a sum that every rank has whole?",
        16 * matrices: "The matrices are right; where are the biases?",
        4 * right: "Those are the weights; gradients and two moments stand beside them.",
        12 * right: "What is missing: weights, gradients, or one of the two moments?",
        16 * right / 1e9: "In GB it is right; the answer is asked for in bytes.",
    }
    number(answer, 16 * right, "bytes", hints=hints)
    return f"Right: {16 * right / 1e6:.0f} MB, of which the undivided bias takes {16 * h:,} bytes."


@exercise("tp_other_order")
def _(answer: Any) -> str:
    hints = {
        4.5: "With GELU it would be; SwiGLU has two matrices that lead to the inner width.",
        8.0: "The inner sums are right. What does a rank have of Y in the end?",
        9.0: "Nearly: the slices of Y are gathered, not added up, and an all-gather sends half of "
        "what an all-reduce does.",
        17.0: "That, times (t−1)/t · h, is what this order sends; what does the right one send?",
    }
    number(answer, 8.5, "times", hints=hints)
    return "Right: (2 · 8 + 1) / 2, whatever t is."


def _everywhere(size: int, mistakes: dict[str, Any]) -> dict[str, Any]:
    """A value for each rank where one is the same on all of them."""
    return {
        words: [value] * size if isinstance(value, Tensor) else value
        for words, value in mistakes.items()
    }


@exercise("my_ffn_shards")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        network = _network(size)
        weights = [network[name] for name in ("up_FH", "up_bias_F", "down_HF")]
        parts = []
        for rank in range(size):
            words = f"For rank {rank} of {size} it "
            try:
                got = answer(*weights, rank, size)
            except Exception as error:
                raise Wrong(f"{words}raised {type(error).__name__}: {error}") from None
            several = isinstance(got, (tuple, list))
            shapes = [tuple(getattr(part, "shape", ())) for part in got] if several else got
            right = [tuple(part.shape) for part in _shards(network, rank, size)]
            if shapes != right:
                words += f"returned the shapes {shapes}; right are {right}."
                raise Wrong(words + " Weights of nn.Linear are [out, in]: where is F?")
            parts.append(_part(network["x_BSH"], *got))
        # What counts is the sum: whoever deals the columns out in another order is right as well.
        gap = (sum(parts) - _part(network["x_BSH"], *weights)).abs().max().item()
        if not gap <= _TOLERANCE:
            alike = all(torch.equal(part, parts[0]) for part in parts)
            why = "All ranks have the same piece" if alike else "Columns and rows do not match"
            raise Wrong(f"{why}: the sum over {size} ranks is off by up to {gap:.3g}.")
    return "Right: the parts of 2 and of 4 ranks add up to the whole network."


def _network(size: int) -> dict[str, Tensor]:
    """Weights of a feed-forward network and its input, the same for everyone who asks."""
    generator = torch.Generator().manual_seed(size)
    shapes = {"x_BSH": (2, 3, 6), "up_FH": (8, 6), "up_bias_F": (8,), "down_HF": (6, 8)}
    shapes |= {"gate_FH": (8, 6), "bias_H": (6,), "dy_BSH": (2, 3, 6)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _part(x_BSH: Tensor, up_fH: Tensor, up_bias_f: Tensor, down_Hf: Tensor) -> Tensor:
    """A summand of the feed-forward network's result, without the last bias: [B, S, H]."""
    return F.gelu(x_BSH @ up_fH.T + up_bias_f) @ down_Hf.T  # [.., H] @ [H, f], [.., f] @ [f, H]


def _own(network: dict[str, Tensor], rank: int, size: int) -> slice:
    share = len(network["up_FH"]) // size
    return slice(rank * share, (rank + 1) * share)


def _shards(network: dict[str, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    own = _own(network, rank, size)
    return network["up_FH"][own], network["up_bias_F"][own], network["down_HF"][:, own]


def _gated(answer: Callable[..., Any]) -> Any:
    """On a rank: what it returned, the gradients of x and up, all-reduces forward and backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    network = {name: tensor.to(ranks.device()) for name, tensor in _network(size).items()}
    own = _own(network, rank, size)
    gate, up, down = network["gate_FH"][own], network["up_FH"][own], network["down_HF"][:, own]
    given = [t.clone().requires_grad_() for t in (network["x_BSH"], gate, up, down)]
    bias_H = network["bias_H"].clone().requires_grad_()
    with count.sent() as forward:
        got = answer(*given, bias_H, dist.group.WORLD)
    if not isinstance(got, Tensor) or not got.requires_grad or got.shape != given[0].shape:
        return (got.cpu() if isinstance(got, Tensor) else got), None, None, None, None
    with count.sent() as backward:
        got.backward(network["dy_BSH"])
    grads = [None if t.grad is None else t.grad.cpu() for t in (given[0], given[2], bias_H)]
    return got.detach().cpu(), *grads, [sum(s.calls.values()) for s in (forward, backward)]


def _gated_whole(network: dict[str, Tensor], own: slice, bias: bool = True) -> list[Tensor]:
    """One process, of the inner columns `own`: Y, and the gradients of x and of up."""
    x_BSH = network["x_BSH"].clone().requires_grad_()
    up_FH = network["up_FH"][own].clone().requires_grad_()
    inner = F.silu(x_BSH @ network["gate_FH"][own].T) * (x_BSH @ up_FH.T)
    y_BSH = inner @ network["down_HF"][:, own].T + bias * network["bias_H"]
    y_BSH.backward(network["dy_BSH"])
    return [y_BSH.detach(), x_BSH.grad, up_FH.grad]


@exercise("my_gated_ffn")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        results = run_answer(_gated, size, answer, timeout=_TIMEOUT)
        network = _network(size)
        bias_H = network["bias_H"]
        y, dx, dup = _gated_whole(network, slice(None))
        parts = [_gated_whole(network, _own(network, rank, size)) for rank in range(size)]
        outputs, dxs, dups, dbiases, calls = zip(*results, strict=True)
        mistakes = {
            f"The bias was added {size} times: add it after the sum, once.": y
            + (size - 1) * bias_H,
            "The bias was not added.": y - bias_H,
            "Each rank has its own summand; nobody added them up.": [part[0] for part in parts],
            "The summands were averaged: they are parts of a sum.": (y - bias_H) / size + bias_H,
        }
        same(outputs, [y] * size, "Y", _TOLERANCE, _everywhere(size, mistakes))
        if any(gradient is None for gradient in (*dxs, *dups, *dbiases)):
            raise Wrong("Y is right, but not everything that it is made of gets a gradient.")
        hints = {
            "It is the rank's own gradient: in front of the first matrices stands nothing that "
            "adds up in backward.": [part[1] for part in parts],
            f"It was added up once more than it should be, {size} times too much.": size * dx,
        }
        same(dxs, [dx] * size, "the gradient of x", _TOLERANCE, _everywhere(size, hints))
        own = [dup[_own(network, rank, size)] for rank in range(size)]
        hints = {
            f"It is {size} times too large: backward added up what all ranks have already. What "
            "does reduce_from do in backward?": [size * gradient for gradient in own]
        }
        same(dups, own, "the gradient of up", _TOLERANCE, hints)
        dbias = network["dy_BSH"].sum((0, 1))
        same(dbiases, [dbias] * size, "the gradient of the bias", _TOLERANCE, {})
        if max(map(sum, calls)) > 2:
            forward, backward = calls[0]
            words = f"Right, but with {forward} messages forward and {backward} backward"
            raise Wrong(f"{words}: let x enter once, for both matrices, and one sum leave.")
    return "Right on 2 and on 4 ranks, with one all-reduce forward and one backward."


# Heads, heads of keys and values, ranks.
_HEADS = ((8, 4, 2), (8, 4, 4), (8, 2, 4), (8, 1, 8), (12, 2, 4), (6, 3, 1))


def _heads_held(heads: int, kv_heads: int, rank: int, size: int) -> list[int]:
    own = range(rank * heads // size, (rank + 1) * heads // size)
    return sorted({head * kv_heads // heads for head in own})


@exercise("my_kv_heads")
def _(answer: Callable[..., Any]) -> str:
    for heads, kv_heads, size in _HEADS:
        held = [_heads_held(heads, kv_heads, rank, size) for rank in range(size)]
        for rank in range(size):
            words = f"heads={heads}, kv_heads={kv_heads}, rank {rank} of {size}: it "
            try:
                got = answer(heads, kv_heads, rank, size)
            except Exception as error:
                raise Wrong(f"{words}raised {type(error).__name__}: {error}") from None
            if not isinstance(got, (tuple, list)) or len(got) != 2:
                raise Wrong(f"{words}returned {got!r}; two lists are asked for.")
            try:
                mine, copies = [sorted(map(int, part)) for part in got]
            except TypeError:
                raise Wrong(f"{words}returned {got!r}; two lists are asked for.") from None
            if mine != held[rank]:
                words += f"holds the heads {mine}; its queries use {held[rank]}."
                if mine == []:
                    words += " With more ranks than heads, some have to hold the same one."
                elif mine == [rank]:
                    words += " Neighbours in rank share a head of keys."
                raise Wrong(words)
            right = [other for other in range(size) if held[other] == held[rank]]
            if copies != right:
                words += f"adds up over the ranks {copies}; the same heads are on {right}."
                if len(copies) == size:
                    words += " Others hold other heads, whose gradients do not belong to these."
                elif copies == [rank]:
                    words += " Each copy saw the queries of its own rank alone."
                raise Wrong(words)
    return f"Right for {len(_HEADS)} models: copies of a head stay equal when they add up."


_TOKENS, _SHARE = (2, 3), 16  # tokens; entries of the vocabulary on each rank


def _logits(size: int, ties: bool) -> Tensor:
    """[B, S, V] logits, all below 0; `ties`: whole numbers, of which many are equal."""
    generator = torch.Generator().manual_seed(size + ties)
    if ties:
        return torch.randint(-4, 0, (*_TOKENS, size * _SHARE), generator=generator).float()
    return -torch.rand(*_TOKENS, size * _SHARE, generator=generator) - 1


def _greedy(answer: Callable[..., Any]) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []
    for ties in (False, True):
        logits_BSV = _logits(size, ties).to(ranks.device())
        own_BSv = logits_BSV[..., rank * _SHARE : (rank + 1) * _SHARE].clone()
        with count.sent() as sent:
            got = answer(own_BSv, dist.group.WORLD)
        value = got.detach().cpu() if isinstance(got, Tensor) else got
        found.append((value, sum(sent.payload.values()) + sent.bytes))
    return found


@exercise("my_greedy")
def _(answer: Callable[..., Any]) -> str:
    sent = 0.0
    for size in (2, 4):
        results = run_answer(_greedy, size, answer, timeout=_TIMEOUT)
        for case, ties in enumerate((False, True)):
            logits_BSV = _logits(size, ties)
            parts = logits_BSV.chunk(size, -1)
            want = logits_BSV.argmax(-1)
            local = [part.argmax(-1) for part in parts]
            numbers = torch.stack([n + rank * _SHARE for rank, n in enumerate(local)])
            has_it = torch.stack([part.amax(-1) for part in parts]) == logits_BSV.amax(-1)
            hints = {
                "It is each rank's own likeliest entry: which rank has the largest logit of all?": (
                    list(numbers)
                ),
                "It is a number in the rank's own part; entries of rank r begin at r v.": (
                    torch.stack(local).where(has_it, torch.tensor(size * _SHARE)).amin(0)
                ),
                "The numbers of all ranks were added up; only one of them is meant.": numbers.sum(
                    0
                ),
                "Of equal logits the largest number won; one process takes the smallest.": (
                    numbers.where(has_it, torch.tensor(-1)).amax(0)
                ),
            }
            got = [
                value.long() if isinstance(value := result[case][0], Tensor) else value
                for result in results
            ]
            same(got, [want] * size, "the tokens", 0.0, _everywhere(size, hints))
            sent = max(result[case][1] for result in results) / want.numel()
            if sent >= 4 * _SHARE:
                words = f"Right, but a rank with {_SHARE} logits a token sent {sent:.0f} bytes for"
                raise Wrong(f"{words} each: do without sending logits.")
    return f"Right on 2 and on 4 ranks, with {sent:.0f} bytes a token, whatever V is."


_LLAMA, _GPT2 = PRESETS["llama-3-8b"], PRESETS["gpt-2"]
_SMALL = Config(vocab=49_152, seq=1024, layers=12, heads=12, hidden=1536)
# Model, bytes that there are, GPUs of a node, and the right degree.
_JOBS = (
    (_LLAMA, 80e9, 8, 4),
    (_SMALL, 3e9, 8, 3),
    (replace(_SMALL, kv_heads=4), 3e9, 8, 4),
    (_LLAMA, 40e9, 4, None),
    (_GPT2, 2e9, 8, None),
    (_LLAMA, 24e9, 32, None),
)


@exercise("my_degree")
def _(answer: Callable[..., Any]) -> str:
    for config, limit, node, right in _JOBS:
        widths = {"heads": config.heads, "key-value heads": config.key_value_heads}
        widths |= {"ffn_width": config.ffn_width, "vocab": config.vocab}
        words = f"With {widths}, limit={limit:.0f} and node={node} it "
        try:
            got = answer(config, limit, node)
        except Exception as error:
            raise Wrong(f"{words}raised {type(error).__name__}: {error}") from None
        if got == right:
            continue
        words += f"returned {got!r}."
        if not isinstance(got, int) or got < 1:
            raise Wrong(words + (" One divides and fits." if right else " None fits, thus None."))
        uncut = [name for name, width in widths.items() if width % got]
        if got > node:
            words += " That many ranks share no fast link."
        elif uncut:
            words += f" It does not divide {' and '.join(uncut)}."
        elif memory.estimate(config, Layout(tp=got), device="gpu").peak > limit:
            words += " That does not fit."
        else:
            words += " A smaller one fits as well, and sends less."
        raise Wrong(words)
    return f"Right for {len(_JOBS)} jobs; for some of them no degree will do."
