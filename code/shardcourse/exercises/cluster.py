"""Exercises of the lesson `cluster`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import add_blanks, add_cases

add_blanks(
    "cluster_ranks",
    {"RANK": 7, "LOCAL_RANK": 1, "GROUP_RANK": 2},
    success="Right: rank 7 is the second one of node 2, so its GPU is number 1 there.",
    default_hint="How many ranks come before it?",
    hints={
        ("RANK", 8): "All three count from 0.",
        ("RANK", 9): "The second node has two ranks, not four.",
    },
)


@add_exercise("cluster_batch")
def _(answer: Any) -> str:
    right = {3, 8, 9, 11}
    if not isinstance(answer, (set, list, tuple)) or not all(
        isinstance(line, int) and 1 <= line <= 12 for line in answer
    ):
        raise WrongAnswer("The answer should be a set of four line numbers, like {1, 2, 3, 4}.")
    hints = {
        3: "How many launchers does a node need, when each starts eight ranks?",
        8: "Where does sbatch stop to read its options?",
        9: "Who else gets SIGUSR1, and what does it do with it?",
        11: "Which machine does that address mean on node 3?",
    }
    if more := set(answer) - right:
        raise WrongAnswer(f"Line {min(more)} is right as it stands.")
    if missing := right - set(answer):
        raise WrongAnswer(f"{4 - len(missing)} of four. {hints[min(missing)]}")
    return "Right: launchers, a late option, an unprotected torchrun, and a node that meets itself."


def _make_slurm_env(job: int, task: int) -> dict[str, str]:
    """Return the variables that srun sets for a task in a job of two nodes with two tasks each."""
    return {
        "SLURM_PROCID": str(task),
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": str(task % 2),
        "SLURM_JOB_ID": str(job),
        "SLURM_NODEID": str(task // 2),
    }


_VALID_PORT = "one of 1024 to 32767, the same on all tasks and another for the next job"


def _compute_env(job: int, task: int, gpus: int) -> dict[str, Any]:
    return {
        "RANK": task,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": task % 2,
        "MASTER_ADDR": "node7",
        "device": task % 2 % gpus if gpus else None,
        "MASTER_PORT": _VALID_PORT,
    }


def _run_answer(answer: Callable, job: int, task: int, gpus: int) -> dict[str, Any] | None:
    """Return the answer's values, with `_VALID_PORT` instead of a valid port."""

    def call_task(job: int, task: int) -> Any:
        return answer(_make_slurm_env(job, task), ["node7", "node9"], gpus)

    if (mine := call_task(job, task)) is None:
        return None
    port = mine.get("MASTER_PORT")
    everyones = {call_task(job, other)["MASTER_PORT"] for other in range(4)}
    others = {call_task(job + more, task)["MASTER_PORT"] for more in (1, 10, 100)}
    fine = (
        isinstance(port, int)
        and 1024 <= port < 32768
        and everyones == {port}
        and port not in others
    )
    return mine | {"MASTER_PORT": _VALID_PORT if fine else port}


add_cases(
    "my_ranks",
    [(job, task, gpus) for job in (1, 71234, 9_999_998) for task in range(4) for gpus in range(3)],
    _compute_env,
    call=_run_answer,
    explain=lambda case, got, want: next(
        f"{name} should be {value!r}." for name, value in want.items() if got.get(name) != value
    ),
    success="Right: six values, and every task of a job finds the same address.",
)


_SUCCESS = "Right, in all parts, as the records of the job show."
_DEFAULT_HINT = "Read the last call of each rank."
add_blanks(
    "hang_uneven",
    {"rank": 2, "collective": "all_reduce", "line": 17},
    success=_SUCCESS,
    default_hint=_DEFAULT_HINT,
    hints={
        ("collective", "barrier"): "That is where the missing rank waits, not the others.",
        ("line", 25): "That line calls a function; the collective is called in the function.",
    },
)
add_blanks(
    "hang_order",
    {"rank 0": "norm", "rank 1": "loss"},
    success=_SUCCESS,
    default_hint=_DEFAULT_HINT,
    hints={
        ("rank 0", "loss"): "Rank 0 has finished all of its calls in that group.",
        ("rank 1", "norm"): "Rank 1 has not called anything in that group yet.",
    },
)
add_blanks(
    "hang_tensor",
    {"runs": "zero3", "rank": 1, "collective": "all_gather", "line": 28},
    success=_SUCCESS,
    default_hint=_DEFAULT_HINT,
    hints={
        ("runs", "tensor"): "That is what the script claims. Which calls would sum activations?",
        ("runs", "ddp"): "DDP all-reduces gradients, and gathers nothing.",
        ("line", 34): "That is where the rank that has run out of data waits.",
    },
)


def _make_links(
    size: int, slow: Callable[[int, int], bool], rate: float = 1e9
) -> tuple[list[tuple[int, int, float]]]:
    return ([(a, b, rate if slow(a, b) else 10e9) for a, b in combinations(range(size), 2)],)


add_cases(
    "cluster_culprit",
    (
        (_make_links(6, lambda a, b: 4 in (a, b)), 4, "All links of rank 4 are slow."),
        (_make_links(6, lambda a, b: a == 0), 0, "All links of rank 0 are slow: 0 is a rank, too."),
        (_make_links(6, lambda a, b: (a, b) == (1, 2)), None, "One link alone is slow, a cable."),
        (_make_links(6, lambda a, b: False), None, "No link is slow."),
        (_make_links(8, lambda a, b: a == 3 and b > 4), None, "3 has three slow links of seven."),
        (_make_links(6, lambda a, b: a == 0, 4e9), None, "4 GB/s are more than a third of 10."),
    ),
    success="Right: a slow card slows all links of its rank, a slow cable one link.",
)


def _count_pairs(answer: Callable[..., Any], size: int) -> int | None:
    """Count the pairs that meet in the answer's rounds; ValueError if a round is not a matching."""
    if (found := answer(size)) is None:
        return None
    if len(found) != size - 1:
        raise ValueError(f"{size} ranks need {size - 1} rounds; yours has {len(found)}")
    for number, pairs in enumerate(found, 1):
        if sorted(rank for pair in pairs for rank in pair) != list(range(size)):
            raise ValueError(f"round {number}={pairs}: each rank has to be in exactly one pair")
    return len({frozenset(pair) for pairs in found for pair in pairs})


add_cases(
    "cluster_rounds",
    ((2,), (4,), (6,), (10,), (16,)),
    lambda size: size * (size - 1) // 2,
    call=_count_pairs,
    explain=lambda case, got, want: f"This number of pairs meets; right is {want}.",
    success="Right: N - 1 rounds without an idle rank, and every pair has met.",
)
