"""The checks of lesson `cluster`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

from shardlab.check import Wrong, called, exercise


@exercise("cluster_ranks")
def _(answer: Any) -> str:
    right = (7, 1, 2)
    hints = {
        (8, 2, 3): "All three count from 0.",
        (9, 1, 2): "The second node has two ranks, not four.",
        (7, 7, 2): "LOCAL_RANK counts on the rank's own node.",
        (7, 1, 7): "GROUP_RANK is the node's number.",
    }
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise Wrong("Three numbers, please: (RANK, LOCAL_RANK, GROUP_RANK).")
    if answer != right:
        raise Wrong(hints.get(answer, f"{answer} it is not: how many ranks come before it?"))
    return "Right: rank 7 is the second one of node 2, so its GPU is number 1 there."


@exercise("my_silent")
def _(answer: Callable[..., Any]) -> str:
    seen = [(0.0, 0, 1), (0.0, 1, 1), (1.0, 0, 2), (1.0, 1, 1), (2.0, 0, 3), (2.0, 1, 1)]
    for now, patience, right, words in (
        (2.0, 1.5, {1}, "agent 1's beat is old, though the host has read it again"),
        (2.0, 2.0, set(), "2 s are not more than 2 s"),
        (5.0, 2.0, {0, 1}, "nobody has been heard for 3 s"),
    ):
        found = called(answer, list(seen), now, patience)
        if found is None or set(found) != right:
            raise Wrong(f"now={now}, patience={patience}: {found}, but {words}: {right}.")
    again = [(0.0, 0, 9), (3.0, 0, 1)]  # an agent that was started anew counts from 1
    if set(called(answer, again, 3.5, 1.0) or ()):
        raise Wrong("A beat that is smaller than before is a sign of life as well.")
    return "Right: a beat counts from when it was first seen, by the host's own clock."


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
    for line in sorted(set(answer) - right):
        raise Wrong(f"Line {line} is right as it stands.")
    for line in sorted(right - set(answer)):
        raise Wrong(f"{4 - len(right - set(answer))} of four. {hints[line]}")
    return "Right: launchers, a late option, an unprotected torchrun, and a node that meets itself."


def _slurm(job: int, task: int) -> dict[str, str]:
    """What srun tells the task of a job of two nodes with two tasks each."""
    return {
        "SLURM_PROCID": str(task),
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": str(task % 2),
        "SLURM_JOB_ID": str(job),
        "SLURM_NODEID": str(task // 2),
    }


@exercise("my_ranks")
def _(answer: Callable[..., Any]) -> str:
    for job in (71234, 71235):
        for task in range(4):
            for gpus in (0, 1, 2):
                got = called(answer, _slurm(job, task), ["node7", "node9"], gpus)
                if not isinstance(got, dict):
                    raise Wrong(f"A dictionary, please; it returned {got!r}.")
                want = {
                    "RANK": task,
                    "WORLD_SIZE": 4,
                    "LOCAL_RANK": task % 2,
                    "MASTER_ADDR": "node7",
                    "device": None if gpus == 0 else task % 2 % gpus,
                }
                for name, value in want.items():
                    if got.get(name) != value:
                        hint = ""
                        if name == "device" and gpus == 1:
                            hint = " A task that sees one GPU calls it 0, whatever its LOCAL_RANK."
                        elif isinstance(got.get(name), str) and name != "MASTER_ADDR":
                            hint = " Slurm's variables are text; numbers are wanted."
                        raise Wrong(
                            f"Task {task} of 4 that sees {gpus} GPUs: {name} is {value!r}, and "
                            f"not {got.get(name)!r}.{hint}"
                        )

    def port(job: int, task: int) -> Any:
        return called(answer, _slurm(job, task), ["node7", "node9"], 2).get("MASTER_PORT")

    for job in (1, 4711, 9_999_999):
        if not isinstance(port(job, 0), int) or not 1024 <= port(job, 0) < 32768:
            raise Wrong(f"MASTER_PORT of job {job} is {port(job, 0)!r}: allowed are 1024 to 32767.")
        if len({port(job, task) for task in range(4)}) > 1:
            raise Wrong(f"The tasks of job {job} get different ports: they would never meet.")
    if port(4711, 0) == port(4712, 0):
        raise Wrong("Jobs 4711 and 4712 get the same port. On one node, they would meet.")
    return "Right: six values, and every task of a job finds the same address."


_JOBS = {  # what is right, and what a well-known mistake says instead
    "hang_uneven": (
        {"rank": 2, "collective": "all_reduce", "line": 17},
        {
            ("rank", 0): "Ranks 0 and 1 wait: they are where all should be.",
            ("rank", 1): "Ranks 0 and 1 wait: they are where all should be.",
            ("collective", "barrier"): "That is where the missing rank waits, and not the others.",
            ("line", 25): "That line calls a function; the collective is called in the function.",
            ("line", 28): "That is where the missing rank stands.",
        },
    ),
    "hang_order": (
        {"rank 0": "norm", "rank 1": "loss"},
        {
            ("rank 0", "loss"): "Rank 0 has finished all of its calls in that group.",
            ("rank 1", "norm"): "Rank 1 has not called anything in that group yet.",
        },
    ),
    "hang_tensor": (
        {"runs": "zero3", "rank": 1, "collective": "all_gather", "line": 27},
        {
            ("runs", "tensor"): "That is what it says. Which calls would add up activations?",
            ("runs", "ddp"): "DDP all-reduces gradients, and gathers nothing.",
            ("runs", "zero1"): "ZeRO-1 gathers once a step, after the optimizer. When is it here?",
            ("rank", 0): "Rank 0 has a sequence more, and waits.",
            ("collective", "barrier"): "There waits the rank that has run out of data.",
            ("collective", "reduce_scatter"): "All of these are done.",
            ("line", 33): "There stands the rank that has run out of data.",
            ("line", 28): "Line 28 is backward, and finished. Which line is the last call of?",
        },
    ),
}


def _judge(answer: Any, name: str) -> str:
    right, hints = _JOBS[name]
    if not isinstance(answer, dict) or set(answer) != set(right):
        raise Wrong(f"The answer is a dictionary with {', '.join(map(repr, right))}.")
    for key, want in right.items():
        got = answer[key]
        if got is None or got is Ellipsis:
            raise Wrong(f"There is no answer for {key!r} yet.")
        if got != want:
            hint = hints.get((key, got)) if isinstance(got, int | str) else None
            raise Wrong(
                hint or f"{got!r} is not right for {key!r}: read the last call of each rank."
            )
    return "Right, in all parts: the records of the job say the same."


for _name in _JOBS:
    exercise(_name)(partial(_judge, name=_name))


@exercise("cluster_culprit")
def _(answer: Any) -> str:
    def links(size: int, slow: Callable[[int, int], bool]) -> list[tuple[int, int, float]]:
        return [(a, b, 1e9 if slow(a, b) else 10e9) for a, b in combinations(range(size), 2)]

    cases = [
        (links(6, lambda a, b: 4 in (a, b)), 4, "all links of rank 4 are slow"),
        (links(6, lambda a, b: a == 0), 0, "all links of rank 0 are slow: 0 is a rank, too"),
        (links(6, lambda a, b: (a, b) == (1, 2)), None, "one link alone is slow, a cable"),
        (links(6, lambda a, b: False), None, "no link is slow"),
        (links(8, lambda a, b: (a, b) in ((3, 4), (3, 5))), None, "two of rank 3's links are slow"),
    ]
    for given, wanted, words in cases:
        found = called(answer, given)
        if found != wanted or type(found) is not type(wanted):
            raise Wrong(f"When {words}, {wanted} is right; yours returns {found!r}.")
    return "Right: a card shows in all links of its rank, a cable in one link of two."


@exercise("cluster_rounds")
def _(answer: Any) -> str:
    for size in (2, 4, 6, 10, 16):
        found = called(answer, size)
        if not isinstance(found, list):
            raise Wrong(f"A list of rounds is wanted, each a list of pairs; yours is {found!r}.")
        found = [[tuple(sorted(pair)) for pair in turn] for turn in found]
        if len(found) != size - 1:
            raise Wrong(f"{size} ranks need {size - 1} rounds; yours has {len(found)}.")
        for number, turn in enumerate(found, 1):
            if sorted(rank for pair in turn for rank in pair) != list(range(size)):
                raise Wrong(
                    f"{size} ranks, round {number}: each rank has to be in it once; it is {turn}."
                )
        met = {pair for turn in found for pair in turn}
        if len(met) != size * (size - 1) // 2:
            raise Wrong(f"{size} ranks: {len(met)} pairs meet, of {size * (size - 1) // 2}.")
    return "Right: N - 1 rounds, nobody idle, and everybody has met everybody."
