"""Exercises of the lesson `train`."""

from __future__ import annotations

import inspect
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import (
    Number,
    Output,
    Trial,
    add_blanks,
    add_cases,
    add_number,
    add_trials,
)
from shardlab import ranks
from shardlab.train import one_gpu, sampler
from shardtools import steps

add_number("validation_filled_up", 58 / 12, "nats", rel_tol=0.002,
       success="Right: 58/12. On 2 or 5 ranks it would be 5.5, on 8 again something else.", hints={
    5.5: "That is the right mean. The sampler gives each of 4 ranks equally many windows.",
    4.5: "That drops the two surplus windows; the sampler repeats two instead.",
})  # fmt: skip


_Losses = list[tuple[float, int]]  # by rank of a group: sum of its losses, their count


def _run_mean(answer: Callable[..., Any], _: dist.ProcessGroup, *groups: _Losses) -> Any:
    ranks_left = iter(range(dist.get_world_size()))
    members = [list(itertools.islice(ranks_left, len(losses))) for losses in groups]
    group = dist.new_subgroups_by_enumeration(members)[0]
    return answer(*sum(groups, [])[dist.get_rank()], group)


@add_trials(
    "my_mean",
    (
        ([(6.0, 3), (1.0, 1)],),
        ([(0.0, 0), (12.0, 4), (2.0, 2)],),
        ([(3.5, 7), (0.0, 0)], [(0.5, 1), (8.0, 2)]),
    ),
    rank_fn=_run_mean,
    success="Right on 2 and 3 ranks and in two groups of 2, with some ranks that have no tokens.",
)
def _(*groups: _Losses) -> Trial:
    def compute_means(*each: tuple[float, int]) -> tuple[float, float, float]:
        total, count = map(sum, zip(*each, strict=True))
        return total / count, sum(part / max(n, 1) for part, n in each) / len(each), total

    rows = [compute_means(*group) for group in groups for _ in group]
    right, means, totals = map(torch.tensor, zip(*rows, strict=True))  # [ranks] each
    mistakes = {
        "That is the mean of the ranks' means: their shares are not equal.": list(means),
        "That is the sum of all losses: divide it by the sum of the counts.": list(totals),
    }
    return Trial([Output("the mean", list(right), mistakes, 1e-5)], size=len(rows))


def _list_remaining_windows(order: list[int], done: int, batch: int, size: int) -> list[list[int]]:
    """Return the windows of all ranks together at each remaining step, sorted."""
    return [sorted(order[k * batch : (k + 1) * batch]) for k in range(done, len(order) // batch)]


def _collect_windows(
    answer: Callable[..., Any], order: list[int], done: int, batch: int, size: int
) -> list[list[int]] | None:
    parts = [answer(order, done, batch, rank, size) for rank in range(size)]
    if None in parts:
        return None
    each = batch // size
    begins = range(0, max(map(len, parts)), each)
    return [sorted(w for part in parts for w in part[at : at + each]) for at in begins]


add_cases(
    "my_rest",
    lambda: [
        (torch.randperm(length, generator=torch.Generator().manual_seed(0)).tolist(), *case)
        for length, *case in ((13, 2, 4, 2), (13, 0, 4, 4), (50, 3, 8, 1), (50, 5, 8, 8))
    ],
    _list_remaining_windows,
    call=_collect_windows,
    success="Right: on any number of ranks each step sees the windows that one process would see.",
    mistakes={
        "Windows are read again that were read before the stop.": lambda order, done, batch, size: (
            _list_remaining_windows(order, 0, batch, size)
        )
    },
)


def _add_script(name: str, upto: int, success: str) -> None:
    """Register an exercise whose answer is a script's path; its first `upto` steps must pass."""

    def check_answer(answer: Any) -> str:
        if not isinstance(answer, str | Path):
            raise WrongAnswer(f"The answer is the path of your script, not {answer!r}.")
        try:
            done, wrong = steps.check_script(answer, upto)
        except ValueError as error:
            raise WrongAnswer(f"{error}.") from None
        if wrong:
            title = steps.STEPS[min(done, upto - 1)][0]
            raise WrongAnswer(f"{done} of {upto} steps are done. Step {done + 1}, {title}: {wrong}")
        return success

    add_exercise(name)(check_answer)


_add_script("my_ddp_script", steps.DDP_STEPS, "Right, all 15 steps: two ranks train as one does.")
_add_script(
    "my_fsdp_script", steps.FSDP2_STEPS, "Right, all 17 steps: each rank holds its shards alone."
)


# Imports that the step `sampler` needs to report the mean loss of all ranks.
_LOSS_AVERAGING = {
    "from shardlab.train.one_gpu": "from shardlab.train.core import average_over_ranks\n"
    "from shardlab.train.one_gpu",
    "losses.append(value.detach())": "losses.append(average_over_ranks(value.detach()))",
}
# Script -> (what it lacks, its changes to the text of the step).
_SCRIPTS = {
    "A": (
        "sampler",
        {"(train, world, rank, seed=seed": "(train, 1, 0, seed=seed", "batch // world": "batch"},
    ),
    "B": (
        "set_epoch",
        {"        sampler.set_epoch(done // len(loader))  # another order in every epoch\n": ""},
    ),
    "C": ("all_reduce", {"average_over_ranks(value.detach())": "value.detach()"}),
    "D": ("wrapper", {"    model = DistributedDataParallel(model)\n": ""}),
}


def compare_scripts() -> list[tuple[str, ...]]:
    """Return table rows for 8 steps: script, rank, and its losses minus those of one process."""
    options = {"steps": 8, "every": 8, "limit": 64 * 67 + 1, "sample": 0}
    rows = []
    with tempfile.TemporaryDirectory(prefix="scripts-") as folder:
        count = itertools.count()

        def run_losses(main: Callable[..., list[float]], size: int) -> list[list[float]]:
            place = Path(folder) / str(next(count))
            run = lambda: main(folder=place / str(dist.get_rank()), **options)  # noqa: E731
            return ranks.run(run, size, show=False)

        (one,) = run_losses(one_gpu.main, 1)
        for name, (_, changes) in _SCRIPTS.items():
            for rank, found in enumerate(run_losses(_edit_sampler(_LOSS_AVERAGING | changes), 2)):
                gaps = [a - b for a, b in zip(found, one, strict=True)]
                cells = ["0" if gap == 0 else f"{gap:+.3f}" for gap in gaps]
                rows.append((name, str(rank), *cells))
    return rows


def _edit_sampler(changes: dict[str, str]) -> Callable[..., list[float]]:
    text, module = inspect.getsource(sampler), ModuleType(f"{sampler.__package__}.changed")
    for old, new in changes.items():
        assert text.count(old) == 1, f"the script no longer has {old!r}"
        text = text.replace(old, new)
    module.__dict__["__package__"] = sampler.__package__
    exec(compile(text, "<a script that lacks a line>", "exec"), module.__dict__)
    return module.main


_HINTS = {
    "sampler": "Without a sampler, what does each rank train on?",
    "set_epoch": "Without set_epoch, which steps have another order than one process's?",
    "all_reduce": "Without the all-reduce of losses, do the ranks print the same?",
    "wrapper": "Without the wrapper, up to which step are the weights right?",
}
add_blanks(
    "missing_lines",
    {name: lacks for name, (lacks, _) in _SCRIPTS.items()},
    success="Right. Each script runs without an error; only a comparison shows the mistake.",
    default_hint=f"Allowed are {', '.join(_HINTS)}.",
    hints={(name, given): words for name in _SCRIPTS for given, words in _HINTS.items()},
)


def _expect_gigabytes(name: str, right: float) -> Number:
    wrong = {
        right / 16 * 4: "Those are the weights alone.",
        right * 8: "FSDP2 divides weights, gradients and optimizer by the ranks.",
    }
    return Number(right, f"GB with {name}", wrong, 0.01)


add_blanks(
    "states_of_a_job",
    {"ddp": _expect_gigabytes("ddp", 16 * 1.3), "fsdp2": _expect_gigabytes("fsdp2", 16 * 1.3 / 8)},
    success="Right: 16 bytes a parameter, on each GPU or shared by eight.",
)
