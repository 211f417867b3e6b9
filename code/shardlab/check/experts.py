"""The checks of lesson `experts`.

Shapes in names as in `shardlab.experts`: T tokens, E experts, C choices of a token, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import experts, ranks
from shardlab.check import Wrong, called, exercise, number, run_answer, same
from shardlab.router import drop
from shardlab.shapes import PRESETS, Config

_TIMEOUT = 10.0  # seconds, for what takes milliseconds: who waits that long waits for ever


@exercise("experts_tokens")
def _(answer: Any) -> str:
    hints = {
        300 * 256: "Each token goes to eight experts, and not to one.",
        300 * 256 / 8 / 64: "That is for each of 64 ranks; asked is for all of them together.",
        300 * 8: "That is how many rows 300 tokens make. How many experts share them?",
    }
    number(answer, 300 * 256 / 8, "tokens", hints=hints)
    return "Right: of eight rows for each token, an expert gets one in 256."


@exercise("experts_wire")
def _(answer: Any) -> str:
    one = 4096 * 8 * 7168 * 2
    hints = {
        2 * one: "That is what it hands over; what is for its own experts does not leave it.",
        one * 63 / 64: "That is the dispatch; what the experts computed has to come back.",
        one: "That is the dispatch, its own experts' rows included.",
        4 * one * 63 / 64: "That is forward and backward; asked is forward.",
        2 * one / 8 * 63 / 64: "Each token travels to eight experts, as eight rows.",
    }
    number(answer, 2 * one * 63 / 64, "bytes", rel=1e-6, hints=hints)
    return f"Right: {2 * one * 63 / 64 / 1e6:,.0f} MB for one layer's forward."


def _chosen(tokens: int, choices: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(tokens, count, generator=generator)
    scores_TE[:, 0] += 0.4  # a favourite, so that there is something to drop
    return scores_TE.topk(choices).indices


@exercise("my_admit")
def _(answer: Callable[..., Any]) -> str:
    for tokens, choices, count, places in ((6, 2, 3, 3), (8, 1, 4, 2), (16, 3, 8, 5), (4, 2, 4, 9)):
        chosen_TC = _chosen(tokens, choices, count, tokens)
        got = called(answer, chosen_TC.clone(), count, places)
        want = drop(chosen_TC[None], count, places)[0]
        if not isinstance(got, Tensor) or got.shape != want.shape:
            given = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise Wrong(f"That is {given}; it should be a tensor of the shape {tuple(want.shape)}.")
        if got.equal(want):
            continue
        by_token = drop(chosen_TC.reshape(1, -1, 1), count, places).view_as(want)
        if got.equal(by_token):
            raise Wrong("You fill places token by token; all first choices come before any second.")
        if got.equal(chosen_TC):
            raise Wrong(f"Nothing is dropped, and {count} experts have {places} places each.")
        loads = [int((got == e).sum()) for e in range(count)]
        if max(loads) > places:
            raise Wrong(f"An expert gets {max(loads)} tokens; it has {places} places.")
        t, c = (got != want).nonzero()[0].tolist()
        told = f"token {t}'s choice {c} is {int(got[t, c])}, and should be {int(want[t, c])}"
        raise Wrong(f"Of {tokens} tokens with {choices} choices among {count} experts, {told}.")
    return f"Right, with one, two and three choices; of the first, {int((_kept() < 0).sum())} fell."


def _kept() -> Tensor:
    return drop(_chosen(6, 2, 3, 6)[None], 3, 3)


def _exchanged(answer: Callable[..., Any], sizes: list[list[int]]) -> tuple[Any, Tensor]:
    """On a rank: what the answer gives, and what is right, for sizes[from][to] rows."""
    rank, group = dist.get_rank(), dist.group.WORLD
    sent, received = sizes[rank], [row[rank] for row in sizes]
    x_RH = torch.arange(sum(sent) * 3.0, device=ranks.device()).view(-1, 3) + 1000 * rank
    want_RH = experts.exchange(x_RH, sent, received, group)
    got = answer(x_RH.clone(), list(sent), received, group)
    return got.cpu() if isinstance(got, Tensor) else got, want_RH.cpu()


@exercise("my_exchange")
def _(answer: Callable[..., Any]) -> str:
    for sizes in ([[2, 3], [1, 4]], [[0, 5], [2, 0]], [[1, 2, 0], [3, 0, 4], [0, 0, 0]]):
        found = run_answer(_exchanged, len(sizes), answer, sizes, timeout=_TIMEOUT)
        got, want = zip(*found, strict=True)
        same(got, want, f"what arrives, where rank 0 sends {sizes[0]} rows,")
    return "Right, on two and on three ranks, one of which sends nothing."


def _averaged(answer: Callable[..., Any], how: str) -> list[Tensor]:
    """On a rank of 2 x 2: its gradients by the answer, or as `how` says: shared one, expert's."""
    rank, world = dist.get_rank(), dist.group.WORLD
    copies = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    generator = torch.Generator().manual_seed(rank)
    grads = [torch.randn(4, generator=generator).to(ranks.device()) for _ in range(2)]
    if how == "answer":
        answer(grads[0], grads[1], world, copies)
    else:
        groups, divisors = {
            "right": ((world, copies), (4, 4)),
            "copies": ((world, copies), (4, 2)),
            "world": ((world, world), (4, 4)),
            "sum": ((world, copies), (1, 1)),
        }[how]
        for grad, group, divisor in zip(grads, groups, divisors, strict=True):
            dist.all_reduce(grad, group=group)
            grad /= divisor
    return [grad.cpu() for grad in grads]


@exercise("my_average")
def _(answer: Callable[..., Any]) -> str:
    runs = {how: ranks.run(_averaged, 4, None, how) for how in ("right", "copies", "world", "sum")}
    found = run_answer(_averaged, 4, answer, "answer", timeout=_TIMEOUT)
    words = {
        "copies": "It is divided by the two copies; but four ranks brought tokens, and the expert "
        "has seen those of all.",
        "world": "Ranks 0 and 1 have different experts: adding up their gradients makes no sense.",
        "sum": "That is the sum; each rank's loss is a mean over its own tokens.",
    }
    for index, what in enumerate(("the gradient that all ranks have", "the expert's gradient")):
        mine, right = ([run[index] for run in each] for each in (found, runs["right"]))
        hints = {words[how]: [run[index] for run in runs[how]] for how in words}
        same(mine, right, what, tolerance=1e-6, hints=hints)  # float32, values of about 1
    return "Right: both are means over the tokens of all four ranks."


def _balanced(answer: Callable[..., Any], how: str) -> tuple[Any, Any]:
    """On a rank: the value and the scores' gradient, by the answer, or of one process."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(8 * size, 4, generator=generator).to(ranks.device())
    logits_TE += torch.linspace(0, 2, 8 * size, device=ranks.device())[:, None] * (
        torch.arange(4, device=ranks.device()) % 2
    )  # ranks see other tokens: each has its own favourites
    scores_TE = logits_TE.softmax(-1)
    chosen_TC = scores_TE.topk(2).indices
    if how != "whole":
        scores_TE, chosen_TC = (x.chunk(size)[rank] for x in (scores_TE, chosen_TC))
    scores_TE = scores_TE.clone().requires_grad_()
    if how == "answer":
        value = answer(scores_TE, chosen_TC, group)
        if not isinstance(value, Tensor) or value.shape != ():
            return value, None
    else:
        load_E = torch.bincount(chosen_TC.flatten(), minlength=4) / chosen_TC.numel()
        value = 4 * (load_E * scores_TE.mean(0)).sum()
    if not value.requires_grad:
        return value.cpu(), None
    value.backward()
    gradient = scores_TE.grad.chunk(size)[rank] if how == "whole" else scores_TE.grad / size
    return value.detach().cpu(), gradient.cpu()


@exercise("my_balancing")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        found = run_answer(_balanced, size, answer, "answer", timeout=_TIMEOUT)
        for rank, (value, _) in enumerate(found):
            if not isinstance(value, Tensor) or value.shape != ():
                raise Wrong(f"Rank {rank} returned {value!r}; it should be a tensor of one number.")
        if found[0][1] is None:
            raise Wrong("The value has no gradient; the mean score has to keep it.")
        runs = {how: ranks.run(_balanced, size, None, how) for how in ("whole", "alone")}
        mean = {
            how: torch.stack([value for value, _ in each]).mean()
            for how, each in {**runs, "answer": found}.items()
        }
        hints = {
            "That is the load of each rank's own tokens: the ranks have to agree on it first.": [
                mean["alone"]
            ]
        }
        same([mean["answer"]], [mean["whole"]], "the mean over ranks", 1e-6, hints)  # float32
        gradients = [[gradient for _, gradient in each] for each in (found, runs["whole"])]
        same(*gradients, "the gradient of the scores", 1e-6)
    return "Right: the ranks' mean, and its gradient, are those of one process, on 2 and on 4."


def _smallest(config: Config, tokens: int, limit: float, rows: int) -> int | None:
    for size in range(1, config.experts + 1):
        if config.experts % size:
            continue
        each = tokens * size * config.experts_per_token / config.experts
        if 16 * experts.held(config, size) <= limit and each >= rows:
            return size
    return None


@exercise("my_expert_ranks")
def _(answer: Callable[..., Any]) -> str:
    wide = replace(PRESETS["mixtral-8x7b"], experts=64, expert_ffn=1792, experts_per_token=6)
    cases = (
        ("Mixtral 8x7B, 4,096 tokens, 280 GB, 300 rows", PRESETS["mixtral-8x7b"], 4096, 280e9, 300),
        ("Mixtral 8x7B, 128 tokens, 800 GB, 100 rows", PRESETS["mixtral-8x7b"], 128, 800e9, 100),
        ("Mixtral 8x7B, 4,096 tokens, 80 GB, 300 rows", PRESETS["mixtral-8x7b"], 4096, 80e9, 300),
        ("64 small experts, 512 tokens, 300 GB, 300 rows", wide, 512, 300e9, 300),
    )
    for words, *case in cases:
        got, want = called(answer, *case), _smallest(*case)
        if got == want:
            continue
        hint = ""
        if type(got) is int and case[0].experts % got == 0 and want is not None:
            each = case[1] * got * case[0].experts_per_token / case[0].experts
            hint = f" With it each expert gets {each:,.0f} rows, and a rank holds "
            hint += f"{16 * experts.held(case[0], got) / 1e9:,.0f} GB."
        raise Wrong(f"{words}: you return {got!r}, right is {want!r}.{hint}")
    return "Right for four jobs, of which one does not fit, however many ranks share the experts."
