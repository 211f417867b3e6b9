"""Exercises of the lesson `pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardcourse.exercises import WrongAnswer
from shardcourse.exercises.forms import Output, RankRecord, Trial, add_cases, add_number, add_trials
from shardlab import pipeline, ranks

_P, _M = 8, 32
_BUBBLE = (_P - 1) / (_M + _P - 1)
add_number("pipeline_bubble", _BUBBLE, rel_tol=0.005,
       success=f"Right: {_P - 1} idle slots of {_M + _P - 1}, 17.9 %, forward as well as backward.",
       hints={
    1 - _BUBBLE: "That is the share of the time in which a stage works.",
    (_P - 1) / _M: "That is idle time over working time; divide by the whole step.",
})  # fmt: skip


def _list_orders(name: str, p: int, m: int) -> list[list[str]]:
    made = pipeline.make_schedule(name, p, m).orders
    return [[str(action) for action in order] for order in made]


def _list_actions(stage: int, p: int, m: int, v: int) -> list[str]:
    order = pipeline.schedule_interleaved(p, m, v).orders[stage]
    return [f"{a.kind}{a.microbatch}.{a.chunk}" for a in order]


add_cases(
    "my_interleaved",
    [  # stages, micro-batches and chunks; the first case tells the mistakes apart
        (stage, p, m, v)
        for p, m, v in ((4, 8, 2), (2, 4, 3), (4, 4, 2), (3, 9, 1), (1, 3, 2), (2, 2, 4))
        for stage in range(p)
    ],
    _list_actions,
    success="Right on every stage, for 6 cases of stages, micro-batches and chunks.",
    mistakes={
        "All forwards come first: how many does a stage run ahead?": lambda *case: sorted(
            _list_actions(*case), key=lambda action: action[0], reverse=True
        )
    },
)

_LIVE_HINT = "A backward frees activations; return the largest number that is held at any time."


def _list_live_cases() -> list[tuple[Any, ...]]:
    rows = [
        ("F0 F1 F2 B0 B1 B2", 3, "Return the largest number of micro-batches at any time."),
        ("F0 B0 F1 B1 F2 B2", 1, _LIVE_HINT),
        ("F0 F1 F2 B0 F3 B1 B2 B3", 3, _LIVE_HINT),
        ("F0 I0 F1 I1 W0 W1", 2, "W needs activations, too, so I does not free them."),
        ("F0 I0 W0 F1 I1 W1", 1, "A split backward has no B. Which pass frees activations then?"),
        *((" ".join(o), 4 - s, _LIVE_HINT) for s, o in enumerate(_list_orders("1f1b", 4, 12))),
        *((" ".join(order), 4, _LIVE_HINT) for order in _list_orders("zb-h1", 4, 12)),
    ]
    return [((order.split(),), most, words) for order, most, words in rows]


add_cases(
    "my_live",
    _list_live_cases,
    success="Right for 13 orders, with whole backwards and with split ones.",
)


def _time_slowest(costs: list[float], parts: int, layers: Sequence[int]) -> float:
    """Return the time of the slowest part; ValueError if `layers` is not a cut of the model."""
    if len(layers) != parts or sum(layers) != len(costs) or min(layers) < 1:
        raise ValueError(f"{layers}: wanted are {parts} numbers, {len(costs)} layers in all")
    ends = [sum(layers[:i]) for i in range(parts + 1)]
    return max(sum(costs[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True))


def _cut_evenly(costs: list[float], parts: int) -> float:
    more = len(costs) % parts
    return _time_slowest(costs, parts, [len(costs) // parts + (i < more) for i in range(parts)])


add_cases(
    "my_balance",
    (
        ([2, 2, 2, 1, 1, 1, 1, 4], 4),  # tells the mistakes apart
        ([2, 1, 1, 1, 1, 1, 1, 1, 1, 5], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8], 3),
        ([5, 4, 3, 2, 1], 5),
        ([7, 3], 1),
        ([4, 1, 3, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], 6),
    ),
    lambda costs, parts: _time_slowest(costs, parts, pipeline.balance_layers(costs, parts)),
    call=lambda answer, costs, parts: _time_slowest(costs, parts, answer(costs, parts)),
    success="Right: no part slower than necessary, for 6 lists of layers.",
    mistakes={"This balances the number of layers; balance their time.": _cut_evenly},
    explain=lambda job, got, want: f"That is the time of its slowest part, and {want} is possible.",
)


def _make_job(size: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """Return a module [b, h] -> [b, h] for each stage, and a batch of inputs and targets."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        parts: list[nn.Module] = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(size)]
        return parts, torch.randn(8, 6), torch.randn(8, 6)


def _flatten_gradient(part: nn.Module) -> Tensor | None:
    found = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten() for gradient in found]) if found else None


def _send_acked(group: dist.ProcessGroup, tensor: Tensor, peer: int) -> None:
    ranks.isend(tensor.detach(), peer, group).wait()
    ranks.irecv(torch.empty(1, device=tensor.device), peer, group).wait()


def _receive_acked(group: dist.ProcessGroup, like: Tensor, peer: int) -> Tensor:
    tensor = torch.empty_like(like, requires_grad=False)
    ranks.irecv(tensor, peer, group).wait()
    ranks.isend(torch.ones(1, device=tensor.device), peer, group).wait()
    return tensor


def _record_passes(part: nn.Module) -> list[str]:
    """Return a list to which hooks append each pass of `part` from now on: "F" or "B"."""
    done: list[str] = []
    part.register_forward_hook(lambda *_: done.append("F"))
    next(part.parameters()).register_hook(lambda gradient: done.append("B"))
    return done


def _run_1f1b(
    answer: Callable[..., Any], group: dist.ProcessGroup, size: int, m: int
) -> tuple[Any, ...]:
    """Return the gradient of a stage's part, the most micro-batches in flight on it, and m."""
    stage, device = dist.get_rank(), ranks.device()
    parts, x_BH, y_BH = _make_job(size)
    part = parts[stage].to(device)
    done = _record_passes(part)
    calls = partial(_send_acked, group), partial(_receive_acked, group)
    answer(part, x_BH.to(device), y_BH.to(device), m, stage, size, *calls)
    if (gradient := _flatten_gradient(part)) is None:
        raise WrongAnswer(f"The part of rank {stage} has no gradient: it never went backward.")
    held = accumulate(1 if kind == "F" else -1 for kind in done)
    return gradient, max(held), m


def _train_one_process(size: int, m: int, scale: float, ones: bool = False) -> Any:
    """Return the gradients of each part in one process, of the losses times `scale`.

    ones: every part but the last goes backward from a gradient of ones.
    """
    parts, x_BH, y_BH = _make_job(size)
    for x, y in zip(x_BH.chunk(m), y_BH.chunk(m), strict=True):
        for part in parts[:-1]:
            x = part(x.detach() if ones else x)
            if ones:
                x.sum().backward()
        (scale * F.mse_loss(parts[-1](x.detach() if ones else x), y)).backward()
    return [_flatten_gradient(part) for part in parts]


def _check_live_microbatches(records: list[RankRecord]) -> str:
    for stage, record in enumerate(records):
        most, m = record.extras
        if most > (enough := min(len(records) - stage, m)):
            words = f"m = {m}: stage {stage} of {len(records)} held {most} micro-batches"
            gpipe = " That is GPipe: all forwards come first." if most == m else ""
            return f"The gradients are right, but for {words}, where {enough} are enough.{gpipe}"
    return ""


@add_trials(
    "my_1f1b",
    ((2, 8), (2, 1), (4, 4)),
    rank_fn=_run_1f1b,
    rules=[_check_live_microbatches],
    success="Right: gradients equal one process's on 2 and 4 ranks, and memory is that of 1F1B.",
)
def _(size: int, m: int) -> Trial:
    mistakes = {
        f"Without a division by m, the sum of {m} means is {m} times the mean.": _train_one_process(
            size, m, 1.0
        ),
        "All stages but the last went backward from ones, not from the gradient that the next one "
        "sends.": _train_one_process(size, m, 1 / m, ones=True),
    }
    right = _train_one_process(size, m, 1 / m)
    # 1e-6: float32, values below 1, eight values added in any order
    return Trial([Output(f"with m = {m}, a gradient", right, mistakes, 1e-6)], size=size)


_CIRCLE_HINT = (
    "Forwards wait for the previous stage, backwards for the next; name all waiting stages."
)
# Orders of the stages, the right answer (stage -> action that waits), a hint for a wrong answer.
_DEADLOCKS: tuple[tuple[str, dict[int, str], str], ...] = (
    ("F0 B0 F1 B1", {}, 'It should be a dict, {} or such as {1: "B0"}; one stage never waits.'),
    ("F0 F1 B0 B1 / F0 B0 F1 B1", {}, "All finish: a waiting stage goes on once another moves."),
    ("F0 F1 B1 B0 / F0 F1 B0 B1", {}, "All finish: orders may differ if none waits in a circle."),
    ("F0 B0 F1 B1 / F0 F1 B0 B1", {0: "B0", 1: "F1"}, _CIRCLE_HINT),
    ("F0 B0 F1 B1 / F1 F0 B0 B1", {0: "B0", 1: "F1"}, "Name all waiting stages, and the action."),
    ("F0 B0 / B0 F0", {0: "B0", 1: "B0"}, "On the last stage a backward waits for its forward."),
    ("F0 B0 / F0 B0 / B0 F0", {0: "B0", 1: "B0", 2: "B0"}, "Name all waiting stages."),
)


def _list_deadlock_cases() -> list[tuple[Any, ...]]:
    found = [(([row.split() for row in rows.split(" / ")],), *rest) for rows, *rest in _DEADLOCKS]
    return found + [((_list_orders(name, 4, 12),), {}, "All finish.") for name in ("naive", "1f1b")]


add_cases(
    "my_deadlock",
    _list_deadlock_cases,
    success=f"Right for {len(_DEADLOCKS) + 2} schedules, some of which never end.",
)

_BUBBLE_HINT = "The bubble is (p-1)/(m+p-1), a share of the whole step."
_MEMORY_HINT = "1F1B's first stage holds up to p micro-batches, each of batch/m sequences."
add_cases(
    "my_microbatches",
    (
        ((4, 64, 0.21, 64), 16, "Return the smallest m that divides the batch and fits."),
        ((4, 60, 0.21, 60), 12, _BUBBLE_HINT),
        ((4, 64, 0.21, 8), 32, _MEMORY_HINT),
        ((8, 512, 0.11, 64), 64, _MEMORY_HINT),
        ((8, 4, 0.75, 4), 4, "With fewer micro-batches than stages it holds all, and no more."),
        ((16, 96, 0.1, 96), None, "No m works: there are only 96 sequences."),
        ((16, 1536, 0.055, 10), None, "No m works: micro-batches of one sequence hold 16 already."),
        ((1, 8, 0.0, 8), 1, "One stage has no bubble."),
    ),
    success="Right for 8 steps; for two of them no m exists.",
)
