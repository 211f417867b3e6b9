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


def _network(size: int) -> dict[str, Tensor]:
    """Weights of a feed-forward network and its input, the same for everyone who asks."""
    generator = torch.Generator().manual_seed(size)
    shapes = {"x_BSH": (2, 3, 6), "up_FH": (8, 6), "up_bias_F": (8,), "down_HF": (6, 8)}
    shapes["down_bias_H"] = (6,)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _part(x_BSH: Tensor, up_fH: Tensor, up_bias_f: Tensor, down_Hf: Tensor) -> Tensor:
    """A summand of the feed-forward network's result, without the last bias: [B, S, H]."""
    return F.gelu(x_BSH @ up_fH.T + up_bias_f) @ down_Hf.T  # [.., H] @ [H, f], [.., f] @ [f, H]


def _cut(network: dict[str, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    share = len(network["up_FH"]) // size
    own = slice(rank * share, (rank + 1) * share)
    return network["up_FH"][own], network["up_bias_F"][own], network["down_HF"][:, own]


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
            right = [tuple(part.shape) for part in _cut(network, rank, size)]
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


def _ffn(answer: Callable[..., Any]) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    network = {name: tensor.to(ranks.device()) for name, tensor in _network(size).items()}
    cut = _cut(network, rank, size)
    got = answer(network["x_BSH"], *cut, network["down_bias_H"], dist.group.WORLD)
    return got.detach().cpu() if isinstance(got, Tensor) else got


@exercise("my_ffn")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        results = run_answer(_ffn, size, answer, timeout=_TIMEOUT)
        network = _network(size)
        x_BSH, bias_H = network["x_BSH"], network["down_bias_H"]
        cuts = [_cut(network, rank, size) for rank in range(size)]
        parts = [_part(x_BSH, *cut) for cut in cuts]
        whole = sum(parts)
        straight = sum((x_BSH @ up.T + bias) @ down.T for up, bias, down in cuts)
        mistakes = {
            f"The last bias was added {size} times: add it after the sum, once.": (
                whole + size * bias_H
            ),
            "The last bias was not added.": whole,
            "Each rank has its own summand; nobody added them up.": [p + bias_H for p in parts],
            "The summands were averaged: they are parts of a sum.": whole / size + bias_H,
            "There is no GELU between the two matrices.": straight + bias_H,
        }
        right = [whole + bias_H] * size
        same(results, right, "Y", _TOLERANCE, _everywhere(size, mistakes))
    return "Right on 2 and on 4 ranks, with the last bias once."


_TOKENS, _WIDTH = (2, 3), 4


def _copy_inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """x and the shortcut's factors, the same everywhere; a matrix of the rank's own."""
    common, own = (torch.Generator().manual_seed(seed) for seed in (0, 1 + rank))
    x, shortcut = torch.randn(2, *_TOKENS, _WIDTH, generator=common)
    return x, shortcut, torch.randn(_WIDTH, 2, generator=own)


def _copy_to(answer: Callable[..., Any]) -> Any:
    x, shortcut, own = (tensor.to(ranks.device()) for tensor in _copy_inputs(dist.get_rank()))
    x.requires_grad_()
    got = answer(x, dist.group.WORLD)
    if not isinstance(got, Tensor) or not got.requires_grad:
        return got.cpu() if isinstance(got, Tensor) else got, None
    ((got @ own).sum() + (x * shortcut).sum()).backward()
    return got.detach().cpu(), None if x.grad is None else x.grad.cpu()


@exercise("my_copy_to")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        results = run_answer(_copy_to, size, answer, timeout=_TIMEOUT)
        x, shortcut, _ = _copy_inputs(0)
        through = [torch.ones(*_TOKENS, 2) @ _copy_inputs(rank)[2].T for rank in range(size)]
        forward = {"Forward it should leave x as it is; it added up the ranks' copies.": size * x}
        copies = [got for got, _ in results]
        same(copies, [x] * size, "what it returned", 0.0, _everywhere(size, forward))
        gradients = [gradient for _, gradient in results]
        if any(gradient is None for gradient in gradients):
            raise Wrong("Autograd does not pass what it returned: x gets no gradient through it.")
        total = sum(through)
        mistakes = {
            "It is the rank's own gradient: nothing was added up in backward.": [
                own + shortcut for own in through
            ],
            "It is the average over ranks: each rank has a part of a sum.": total / size + shortcut,
            "What came through the shortcut, around the operator, was added up as well, "
            f"{size} times: the sum belongs to the copy, not to x.": total + size * shortcut,
            "What came through the operator is lost.": shortcut,
        }
        right = [total + shortcut] * size
        same(gradients, right, "the gradient of x", _TOLERANCE, _everywhere(size, mistakes))
    return "Right on 2 and on 4 ranks: a copy forward, a sum backward, and x's shortcut untouched."


_SHARE = 16  # entries of the vocabulary on each rank


def _logits(size: int, high: bool) -> tuple[Tensor, Tensor]:
    """[B, S, V] logits and [B, S] targets; `high`: beyond what exp can take in float32."""
    generator = torch.Generator().manual_seed(size + high)
    logits_BSV = 2 * torch.randn(*_TOKENS, size * _SHARE, generator=generator)
    if high:
        logits_BSV = logits_BSV + 100 * (1 + torch.arange(size).repeat_interleave(_SHARE) % 2)
    return logits_BSV, torch.randint(size * _SHARE, _TOKENS, generator=generator)


def _loss(answer: Callable[..., Any]) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []
    for high in (False, True):
        logits_BSV, targets_BS = (tensor.to(ranks.device()) for tensor in _logits(size, high))
        own_BSv = logits_BSV[..., rank * _SHARE : (rank + 1) * _SHARE].clone()
        with count.sent() as sent:
            got = answer(own_BSv, targets_BS, dist.group.WORLD)
        value = got.detach().cpu() if isinstance(got, Tensor) else got
        found.append((value, sum(sent.payload.values()) + sent.bytes))
    return found


def _mistaken_loss(logits_BSV: Tensor, targets_BS: Tensor, size: int) -> dict[str, Tensor]:
    """What well-known mistakes compute."""
    parts = logits_BSV.chunk(size, -1)
    most = [part.amax(-1) for part in parts]
    target_BS = logits_BSV.gather(-1, targets_BS[..., None])[..., 0]
    owners_most_BS = torch.stack(most).gather(0, targets_BS[None] // _SHARE)[0]
    sums_BS = sum((part - m[..., None]).exp().sum(-1) for part, m in zip(parts, most, strict=True))
    whole_BS = logits_BSV.logsumexp(-1)
    everyones_BS = most_BS = logits_BSV.amax(-1)
    for rank, part in enumerate(parts):
        at_BS = (targets_BS - rank * _SHARE).clamp(0, _SHARE - 1)
        everyones_BS = everyones_BS + part.gather(-1, at_BS[..., None])[..., 0] - most_BS
    return {
        "Each rank subtracted its own largest logit; only with the same one everywhere do the "
        "exponentials add up.": (sums_BS.log() - (target_BS - owners_most_BS)).mean(),
        "Each rank added a logit for the target; one alone has it.": (
            whole_BS - everyones_BS
        ).mean(),
        "It is the sum over all tokens; the mean is asked for.": (whole_BS - target_BS).sum(),
    }


@exercise("my_loss")
def _(answer: Callable[..., Any]) -> str:
    numbers = 0.0
    for size in (2, 4):
        results = run_answer(_loss, size, answer, timeout=_TIMEOUT)
        for case, high in enumerate((False, True)):
            got = [result[case][0] for result in results]
            if all(isinstance(value, Tensor) and not value.isfinite().all() for value in got):
                words = "Logits of 100 and more" if high else "The values"
                raise Wrong(f"{words} give {got[0]}: subtract the largest logit of all ranks.")
            logits_BSV, targets_BS = _logits(size, high)
            want = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
            hints = _everywhere(size, _mistaken_loss(logits_BSV, targets_BS, size))
            # Logits of some 200 in float32: their last digit is 1.5e-5.
            same(got, [want] * size, "the loss", 1e-4, hints)
            numbers = max(result[case][1] for result in results) / targets_BS.numel() / 4
            if numbers >= _SHARE:
                words = (
                    f"Right, but a rank with {_SHARE} logits a token sent {numbers:.0f} numbers:"
                )
                raise Wrong(f"{words} do without sending logits.")
    return f"Right on 2 and on 4 ranks, with {numbers:.0f} numbers a token, whatever V is."


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
        elif memory.estimate(config, tp=got, device="gpu").peak > limit:
            words += " That does not fit."
        else:
            words += " A smaller one fits as well, and sends less."
        raise Wrong(words)
    return f"Right for {len(_JOBS)} jobs; for some of them no degree will do."
