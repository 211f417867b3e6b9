"""Exercises of the lesson `experts`.

Shapes in names as in `shardlab.experts`: T tokens, E experts, C choices per token, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcourse.exercises import WrongAnswer
from shardcourse.exercises.forms import Output, Trial, add_cases, add_number, add_trials
from shardlab import experts, ranks
from shardlab.common.shapes import PRESETS, Config
from shardlab.gpt.router import drop_overflow

add_number("experts_tokens", 300 * 256 / 8, "tokens",
       success="Right: of eight rows for each token, an expert gets one in 256.", hints={
    300 * 256: "Each token goes to eight experts, not to one.",
})  # fmt: skip

_PAYLOAD = 4096 * 8 * 7168 * 2
add_number("experts_wire", 2 * _PAYLOAD * 63 / 64, "bytes", rel_tol=1e-6,
       success=f"Right: {2 * _PAYLOAD * 63 / 64 / 1e6:,.0f} MB for one layer's forward.", hints={
    2 * _PAYLOAD: "That includes the tokens for its own experts, which do not leave the rank.",
    _PAYLOAD * 63 / 64: "That is the dispatch alone; the experts' outputs have to come back.",
})  # fmt: skip


def _choose_experts(tokens: int, choices: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    scores_TE = torch.rand(tokens, count, generator=generator)
    scores_TE[:, 0] += 0.4  # a favourite expert, so that some tokens exceed the capacity
    return scores_TE.topk(choices).indices


def _call_admit(answer: Callable, chosen_TC: Tensor, count: int, capacity: int) -> Any:
    before_TC = chosen_TC.clone()
    found = answer(chosen_TC, count, capacity)
    if not chosen_TC.equal(before_TC):
        raise ValueError("chosen_TC has changed: return a copy")
    return found


add_cases(
    "my_admit",
    lambda: [
        (_choose_experts(tokens, choices, count), count, capacity)
        for tokens, choices, count, capacity in (
            (6, 2, 3, 3),
            (8, 1, 4, 2),
            (16, 3, 8, 5),
            (4, 2, 4, 9),
        )
    ],
    lambda chosen_TC, count, capacity: drop_overflow(chosen_TC[None], count, capacity)[0],
    call=_call_admit,
    equal=torch.equal,
    success="Right, with one, two and three choices, and where no token is dropped.",
    mistakes={
        "You fill the capacity token by token; all first choices come before any second.": (
            lambda x, n, capacity: drop_overflow(x.reshape(1, -1, 1), n, capacity).view_as(x)
        )
    },
)


@add_trials(
    "my_exchange",
    ([[2, 3], [1, 4]], [[0, 5], [2, 0]], [[1, 2, 0], [3, 0, 4], [0, 0, 0]]),
    success="Right, on two and on three ranks, one of which sends nothing.",
)
def _(sizes: list[list[int]]) -> Trial:
    """Return the trial in which rank i sends sizes[i][j] rows to rank j."""
    received = [list(column) for column in zip(*sizes, strict=True)]
    x = [torch.arange(sum(sent) * 3.0).view(-1, 3) + 1000 * r for r, sent in enumerate(sizes)]
    cut = [x_RH.split(sent) for x_RH, sent in zip(x, sizes, strict=True)]
    right = [torch.cat([parts[rank] for parts in cut]) for rank in range(len(sizes))]
    what = f"what arrives, where rank 0 sends {sizes[0]} rows,"
    return Trial([Output(what, right)], list(zip(x, sizes, received, strict=True)))


def _make_gradients(rank: int) -> Tensor:
    """Return a rank's gradients: one of the parameters that all ranks share, one of its expert."""
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))


def _run_average(
    answer: Callable[..., Any], data: dist.ProcessGroup, size: int
) -> tuple[Tensor, ...]:
    copies = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    grads = [grad.clone() for grad in _make_gradients(dist.get_rank()).to(ranks.device())]
    answer(*grads, data, copies)
    return tuple(grads)


@add_trials(
    "my_average",
    (4,),
    rank_fn=_run_average,
    success="Right: both are means over the tokens of all four ranks.",
)
def _(size: int) -> Trial:
    grads = torch.stack([_make_gradients(rank) for rank in range(size)])
    total, own = grads[:, 0].sum(0), grads[:, 1]
    copies = [own[rank % 2] + own[rank % 2 + 2] for rank in range(size)]
    of_own = {
        "It is divided by the two copies; but the tokens came from four ranks, and the expert has "
        "seen all of them.": [x / 2 for x in copies],
        "Ranks 0 and 1 have different experts: adding up their gradients makes no sense.": (
            own.sum(0) / 4
        ),
    }
    # float32, values of about 1
    parts = [
        Output("the gradient that all ranks have", total / 4, {}, 1e-6),
        Output("the expert's gradient", [x / 4 for x in copies], of_own, 1e-6),
    ]
    return Trial(parts, size=size)


def _route_tokens(size: int) -> tuple[Tensor, Tensor]:
    """Return scores and choices of all ranks' tokens; each rank's tokens prefer other experts."""
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(8 * size, 4, generator=generator)
    logits_TE += torch.linspace(0, 2, 8 * size)[:, None] * (torch.arange(4) % 2)
    scores_TE = logits_TE.softmax(-1)
    return scores_TE, scores_TE.topk(2).indices


def _compute_balance_loss(scores_TE: Tensor, chosen_TC: Tensor) -> Tensor:
    load_E = torch.bincount(chosen_TC.flatten(), minlength=4) / chosen_TC.numel()
    return 4 * (load_E * scores_TE.mean(0)).sum()


def _run_balance_loss(
    answer: Callable[..., Any], group: dist.ProcessGroup, size: int
) -> tuple[Any, ...]:
    """Run the answer on a rank; return the mean of all ranks' values, and its scores' gradient."""
    scores_TE, chosen_TC = (
        x.chunk(size)[dist.get_rank()].to(ranks.device()) for x in _route_tokens(size)
    )
    scores_TE = scores_TE.clone().requires_grad_()
    value = answer(scores_TE, chosen_TC, group)
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise WrongAnswer("The value has no gradient; the mean score has to keep it.")
    value.backward()
    mean = value.detach().clone()
    dist.all_reduce(mean, group=group)
    return mean / size, scores_TE.grad / size


@add_trials(
    "my_balancing",
    (2, 4),
    rank_fn=_run_balance_loss,
    success="Right: the ranks' mean, and its gradient, are those of one process, on 2 and on 4.",
)
def _(size: int) -> Trial:
    scores_TE, chosen_TC = _route_tokens(size)
    each = zip(scores_TE.chunk(size), chosen_TC.chunk(size), strict=True)
    alone = sum(_compute_balance_loss(*mine) for mine in each) / size
    scores_TE.requires_grad_()
    right = _compute_balance_loss(scores_TE, chosen_TC)
    right.backward()
    hint = "That is the load of each rank's own tokens: the ranks have to agree on it first."
    # float32, values of about 1
    parts = [
        Output("the mean over ranks", right.detach(), {hint: alone}, 1e-6),
        Output("the gradient of the scores", scores_TE.grad.chunk(size), {}, 1e-6),
    ]
    return Trial(parts, size=size)


def _find_min_expert_ranks(config: Config, tokens: int, limit: float, rows: int) -> int | None:
    for size in range(1, config.experts + 1):
        if config.experts % size or 16 * experts.count_held_parameters(config, size) > limit:
            continue
        if tokens * size * config.experts_per_token / config.experts >= rows:
            return size
    return None


_MIXTRAL = PRESETS["mixtral-8x7b"]
add_cases(
    "my_expert_ranks",
    (
        (_MIXTRAL, 4096, 280e9, 300),
        (_MIXTRAL, 128, 800e9, 100),
        (_MIXTRAL, 4096, 80e9, 300),
        (_MIXTRAL, 4096, 16 * experts.count_held_parameters(_MIXTRAL, 2), 300),  # to the byte
        (_MIXTRAL, 4096, 190e9, 300),  # more than a quarter of all states
        (_MIXTRAL, 1200, 800e9, 300),  # exactly 300 rows
        (replace(_MIXTRAL, experts=64, expert_ffn=1792, experts_per_token=6), 512, 300e9, 300),
    ),
    _find_min_expert_ranks,
    success="Right for 7 jobs, of which one does not fit, however many ranks share the experts.",
)
