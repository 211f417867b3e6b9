"""Exercises of the lesson `cluster`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from shardcourse.exercises import Wrong, exercise
from shardcourse.exercises.forms import blanks, cases

blanks(
    "cluster_ranks",
    {"RANK": 7, "LOCAL_RANK": 1, "GROUP_RANK": 2},
    says="Right: rank 7 is the second one of node 2, so its GPU is number 1 there.",
    otherwise="How many come before it?",
    wrong={
        ("RANK", 8): "All three count from 0.",
        ("RANK", 9): "The second node has two ranks, not four.",
    },
)


@exercise("cluster_batch")
def _(answer: Any) -> str:
    right = {3, 8, 9, 11}
    if not isinstance(answer, (set, list, tuple)) or not all(
        isinstance(line, int) and 1 <= line <= 12 for line in answer
    ):
        raise Wrong("A set of four numbers of lines, please, as {1, 2, 3, 4}.")
    hints = {
        3: "How many launchers does a node need, when each starts eight ranks?",
        8: "Where does sbatch stop to read its options?",
        9: "Who else gets SIGUSR1, and what does it do with it?",
        11: "Which machine is meant by that address, on node 3?",
    }
    if more := set(answer) - right:
        raise Wrong(f"Line {min(more)} is right as it stands.")
    if missing := right - set(answer):
        raise Wrong(f"{4 - len(missing)} of four. {hints[min(missing)]}")
    return "Right: launchers, a late option, an unprotected torchrun, and a node that meets itself."


def _slurm(job: int, task: int) -> dict[str, str]:
    """Return the variables that srun sets for a task in a job of two nodes with two tasks each."""
    return {
        "SLURM_PROCID": str(task),
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": str(task % 2),
        "SLURM_JOB_ID": str(job),
        "SLURM_NODEID": str(task // 2),
    }


_PORT = "one of 1024 to 32767, the same on all tasks and another for the next job"


def _placed(job: int, task: int, gpus: int) -> dict[str, Any]:
    return {
        "RANK": task,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": task % 2,
        "MASTER_ADDR": "node7",
        "device": task % 2 % gpus if gpus else None,
        "MASTER_PORT": _PORT,
    }


def _found(answer: Callable[..., Any], job: int, task: int, gpus: int) -> dict[str, Any] | None:
    """Return the answer's values, with `_PORT` in place of a valid port."""

    def found(job: int, task: int) -> Any:
        return answer(_slurm(job, task), ["node7", "node9"], gpus)

    if (mine := found(job, task)) is None:
        return None
    port = mine.get("MASTER_PORT")
    everyones = {found(job, other)["MASTER_PORT"] for other in range(4)}
    other = found(job + 1, task)["MASTER_PORT"]
    fine = isinstance(port, int) and 1024 <= port < 32768 and everyones == {port} != {other}
    return mine | {"MASTER_PORT": _PORT if fine else port}


cases(
    "my_ranks",
    [(job, task, gpus) for job in (1, 71234, 9_999_998) for task in range(4) for gpus in range(3)],
    _placed,
    call=_found,
    why=lambda case, got, want: next(
        f"{name} should be {value!r}." for name, value in want.items() if got.get(name) != value
    ),
    says="Right: six values, and every task of a job finds the same address.",
)


_RIGHT = "Right, in all parts: the records of the job say the same."
_LAST = "Read the last call of each rank."
blanks(
    "hang_uneven",
    {"rank": 2, "collective": "all_reduce", "line": 17},
    says=_RIGHT,
    otherwise=_LAST,
    wrong={
        ("collective", "barrier"): "That is where the missing rank waits, and not the others.",
        ("line", 25): "That line calls a function; the collective is called in the function.",
    },
)
blanks(
    "hang_order",
    {"rank 0": "norm", "rank 1": "loss"},
    says=_RIGHT,
    otherwise=_LAST,
    wrong={
        ("rank 0", "loss"): "Rank 0 has finished all of its calls in that group.",
        ("rank 1", "norm"): "Rank 1 has not called anything in that group yet.",
    },
)
blanks(
    "hang_tensor",
    {"runs": "zero3", "rank": 1, "collective": "all_gather", "line": 28},
    says=_RIGHT,
    otherwise=_LAST,
    wrong={
        ("runs", "tensor"): "That is what it says. Which calls would add up activations?",
        ("runs", "ddp"): "DDP all-reduces gradients, and gathers nothing.",
        ("line", 34): "There stands the rank that has run out of data.",
    },
)


def _links(size: int, slow: Callable[[int, int], bool]) -> tuple[list[tuple[int, int, float]]]:
    return ([(a, b, 1e9 if slow(a, b) else 10e9) for a, b in combinations(range(size), 2)],)


cases(
    "cluster_culprit",
    (
        (_links(6, lambda a, b: 4 in (a, b)), 4, "All links of rank 4 are slow."),
        (_links(6, lambda a, b: a == 0), 0, "All links of rank 0 are slow: 0 is a rank, too."),
        (_links(6, lambda a, b: (a, b) == (1, 2)), None, "One link alone is slow, a cable."),
        (_links(6, lambda a, b: False), None, "No link is slow."),
        (_links(8, lambda a, b: (a, b) in ((3, 4), (3, 5))), None, "Two of 3's links are slow."),
    ),
    says="Right: a card shows in all links of its rank, a cable in one link of two.",
)


def _meetings(answer: Callable[..., Any], size: int) -> int | None:
    """Count the pairs that meet in the answer's rounds; ValueError if a round is not a matching."""
    if (found := answer(size)) is None:
        return None
    if len(found) != size - 1:
        raise ValueError(f"{size} ranks need {size - 1} rounds; yours has {len(found)}")
    for number, pairs in enumerate(found, 1):
        if sorted(rank for pair in pairs for rank in pair) != list(range(size)):
            raise ValueError(f"round {number}: each rank has to be in it once; it is {pairs}")
    return len({frozenset(pair) for pairs in found for pair in pairs})


cases(
    "cluster_rounds",
    ((2,), (4,), (6,), (10,), (16,)),
    lambda size: size * (size - 1) // 2,
    call=_meetings,
    why=lambda case, got, want: f"So many pairs meet, of {want}.",
    says="Right: N - 1 rounds, nobody idle, and everybody has met everybody.",
)
