"""The checks of lesson `sequence_parallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardlab import count
from shardlab.check import Wrong, called, exercise, number, run_answer, same
from shardlab.model import GPT, Config


@exercise("sequence_bytes")
def _(answer: Any) -> str:
    sbh, t = 2048 * 12_288, 8
    number(
        answer,
        sbh * 34 / t,
        "bytes",
        rel=0.001,
        hints={
            sbh * (10 + 24 / t): "That is tensor parallelism alone: the 10 of norms, dropout and "
            "inputs are to be divided, too.",
            sbh * 34: "That is the whole layer: each rank keeps an eighth of everything.",
            sbh * (34 + 80) / t: "That keeps attention's scores: a fused kernel does not.",
            sbh * 24 / t: "That is what stands inside of the cut matrices; where are the norms' "
            "inputs?",
            sbh * 34 / t / 1e6: "In MB it is right; the answer is asked for in bytes.",
        },
    )
    return "Right: 34/8 bytes for each of the 2048 × 12,288 elements, 107 MB instead of 856."


_SMALL = {"vocab": 8, "seq": 4, "layers": 2, "heads": 2, "hidden": 8}
_MODELS = {
    "GPT-2's kind": Config(**_SMALL),
    "Llama's kind": Config(**_SMALL, mlp="swiglu", norm="rms", bias=False, tied=False),
}


def _summands(names: list[str]) -> set[str]:
    """Parameters that are whole on every rank, and meet this rank's tokens alone."""
    late = ("attention.out.bias", "ffn.down.bias")
    return {name for name in names if "norm." in name or name.endswith(late)}


@exercise("my_summands")
def _(answer: Callable[[list[str]], Any]) -> str:
    for kind, config in _MODELS.items():
        names = [name for name, _ in GPT(config).named_parameters()]
        given = called(answer, list(names))
        if given is None or isinstance(given, str):
            raise Wrong("my_summands should return the names, as a list or a set.")
        got, want = set(given), _summands(names)
        if got == want:
            continue
        if unknown := got - set(names):
            raise Wrong(f"With {kind} it returned {min(unknown)!r}, which is none of the names.")
        words = f"With {kind} "
        if extra := sorted(got - want):
            words += f"{extra[0]!r} is one too many. "
            if extra[0].endswith("bias"):
                words += "A column-cut layer's bias is cut, too, and added to all tokens."
            elif "embedding" in extra[0] or "head" in extra[0]:
                words += "It is cut by the vocabulary, and each rank meets all tokens with it."
            else:
                words += "This matrix is cut, and all tokens go through each rank's part of it."
        else:
            missing = min(want - got)
            words += f"{missing!r} is missing. "
            if "norm" in missing:
                words += "A norm is whole on every rank and has seen this rank's tokens alone."
            else:
                words += "It is added behind the reduce-scatter, to this rank's tokens alone."
        raise Wrong(words)
    return "Right: norms, and biases that are added behind the reduce-scatter."


_B, _SHARE, _H, _F = 2, 3, 4, 5


def _tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's share of the stream, its columns, and what it does with the result: a factor."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (_B, _SHARE, _H), (_H, _F), (_B, 4 * _SHARE, _F)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


def _column(answer: Callable[..., Any]) -> tuple[Any, ...]:
    size = dist.get_world_size()
    x_BsH, w_HF, factor = _tokens(dist.get_rank())
    x_BsH.requires_grad_(), w_HF.requires_grad_()
    kept: dict[int, int] = {}  # storages that backward holds on to, and their bytes

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        y_BSF = answer(x_BsH, w_HF, dist.group.WORLD)
    asked = 0
    if isinstance(y_BSF, Tensor) and y_BSF.requires_grad and y_BSF.shape[1] == size * _SHARE:
        with count.sent() as sent:
            (y_BSF * factor[:, : size * _SHARE]).sum().backward()
        asked = sum(sent.calls.values()) + sent.messages
    return y_BSF, x_BsH.grad, w_HF.grad, max(kept.values(), default=0), asked


@exercise("my_column")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        results = run_answer(_column, size, answer, timeout=10)
        outputs, dx, dw, kept, asked = zip(*results, strict=True)
        given = [_tokens(rank) for rank in range(size)]
        whole = torch.cat([x for x, _, _ in given], 1)
        mixed = torch.cat([x for x, _, _ in given]).view(whole.shape)
        hint = "An all-gather puts one rank's tensor behind the other's, whole batches: bring the "
        hint += "tokens of one sequence together before reshaping (torch.cat(…, dim=1))."
        # float64, sums of a few numbers of order 1
        right = [whole @ w for _, w, _ in given]
        same(outputs, right, "the output", 1e-12, {hint: [mixed @ w for _, w, _ in given]})
        if any(gradient is None for gradient in (*dx, *dw)):
            raise Wrong(
                "The output is right, and x_BsH or w_HF gets no gradient: collectives know nothing "
                "of autograd. Write a torch.autograd.Function with a backward for both."
            )
        factors = [factor[:, : size * _SHARE] for _, _, factor in given]
        each = [f @ w.T for f, (_, w, _) in zip(factors, given, strict=True)]
        own = [dx_.chunk(size, 1)[r] for r, dx_ in enumerate(each)]
        words = "It is this rank's part alone: every rank has used these tokens, and what they "
        words += "found for them adds up."
        total = list(torch.stack(each).sum(0).chunk(size, 1))
        same(dx, total, "the gradient of x_BsH", 1e-12, {words: own})
        mine = [
            x.flatten(0, 1).T @ f.chunk(size, 1)[r].flatten(0, 1)
            for r, ((x, _, _), f) in enumerate(zip(given, factors, strict=True))
        ]
        words = "It is that of this rank's tokens alone: all tokens went through these columns."
        want = [whole.flatten(0, 1).T @ f.flatten(0, 1) for f in factors]
        same(dw, want, "the gradient of w_HF", 1e-12, {words: mine})
        if max(kept) >= whole.nbytes or min(asked) < 2:
            raise Wrong(
                "All of it is right, but what was gathered is kept until backward. Keep the share "
                "(ctx.save_for_backward(x_BsH, w_HF)), and gather once more in backward."
            )
    return "Right on 2 and 4 ranks, and between forward and backward only the share is kept."
