"""Root cause of a hang with nccl, from the records that ranks leave, without a GPU.

nccl's wait() returns at once; a rank goes on after a collective that the others never entered, up
to where it reads a number that the GPU has not computed yet, anywhere in the program.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from shardlab.ranks import root_cause, stacks, worker
from shardlab.ranks.collective_log import CollectiveCall

OVER = "its function is over"
READS = ["loss.item()", "x[mask].sum()", "torch.cuda.synchronize()"]
SCRIPT = ["dist.all_reduce(loss)", "dist.broadcast(loss, 0)", "while True: step()", *READS]


def explain_stands(
    folder: Path,
    stands: list[str],
    entered: list[list[str]],
    backend: str = "cpu:gloo,cuda:nccl",
) -> tuple[list[int], str]:
    """Return the caller's explanation for ranks at these lines, after these calls, in this order.

    A call is a collective's name, after "0,1:" if it is in a group of its own.
    """
    script = folder / "script.py"
    script.write_text("\n".join(SCRIPT) + "\n")
    job = worker.Job(len(stands), backend, "cuda", 5.0, str(folder), 0, torch.empty(0))
    for rank, (line, names) in enumerate(zip(stands, entered, strict=True)):
        if line == OVER:
            frame = f'  File "{worker.__file__}", line 1 in call_and_synchronize\n'
        else:
            frame = f'  File "{script}", line {SCRIPT.index(line) + 1} in train\n'
        if line in (OVER, "torch.cuda.synchronize()"):
            frame = f'  File "{torch.cuda.__file__}", line 1 in synchronize\n' + frame
        job.get_path("stack", rank).write_text(
            "Thread 0x00007f0000000001 (most recent call first):\n"
            f'  File "{worker.__file__}", line 1 in _exit_with_caller\n'
            '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n\n'
            f"Current thread 0x00007f0000000000 (most recent call first):\n{frame}"
        )
        log = ""
        for call in names:
            members, _, name = call.rpartition(":")
            place = {"file": str(script), "line": "1", "function": "train"}
            where = f"[{members}]" if members else "all"
            log += CollectiveCall(where, name=name, sizes="float32[1]", **place).to_line()
        job.get_path("calls", rank).write_text(log)
    outcomes = [root_cause.read_outcome(job, rank, None, None) for rank in range(len(stands))]
    return root_cause.explain_failure(outcomes, 5.0)


@pytest.mark.parametrize("read", READS)
def test_ranks_that_read_a_result_wait(read: str, tmp_path: Path):
    """Rank 2 spins; the others have entered a collective and wait where they need its result."""
    stands = [read, read, "while True: step()", read]
    two = ["all_reduce", "all_reduce"]
    at_fault, message = explain_stands(tmp_path, stands, [two, two, ["all_reduce"], two])
    assert at_fault == [2]
    assert "rank 2 of 4" in message and "Ranks 0, 1 and 3 wait for rank 2 in all_reduce" in message


def test_a_collective_that_hangs_when_its_function_is_over(tmp_path: Path):
    """No rank has read the result: the GPU still waits for rank 1, which has returned."""
    at_fault, message = explain_stands(tmp_path, [OVER, OVER], [["all_reduce"] * 2, ["all_reduce"]])
    assert at_fault == [1]
    assert "Rank 0 waits for rank 1 in all_reduce at" in message
    assert "script.py, line 1, in train" in message


def test_groups_are_looked_at_one_by_one(tmp_path: Path):
    """Rank 0 waits in its own group; in the other group both ranks entered equally many calls."""
    calls = [["0, 1:all_reduce"], [], ["2, 3:broadcast"], ["2, 3:broadcast"]]
    stands = ["loss.item()", "while True: step()", "loss.item()", "loss.item()"]
    at_fault, _ = explain_stands(tmp_path, stands, calls)
    assert at_fault == [1]


def test_with_gloo_a_rank_that_reads_does_not_wait(tmp_path: Path):
    """With gloo, wait() blocks until the result exists: a rank that reads a number has it."""
    calls = [["all_reduce"], ["all_reduce"]]
    stands = ["loss.item()", "loss.item()"]
    _, message = explain_stands(tmp_path, stands, calls, backend="gloo")
    assert "rank 0 of 2 did not finish" in message and "waits" not in message


def test_a_hook_stands_in_a_thread_of_autograd(tmp_path: Path):
    """Backward runs in that thread on a GPU, and the main thread waits for it in C++."""
    from torch.autograd import graph

    script = tmp_path / "script.py"
    dump = (
        "Thread 0x00007f0000000003 (most recent call first):\n"
        f'  File "{script}", line 7 in hook\n\n'
        "Thread 0x00007f0000000002 (most recent call first):\n"
        f'  File "{worker.__file__}", line 1 in _exit_with_caller\n'
        f'  File "{threading.__file__}", line 1 in _bootstrap\n\n'
        "Current thread 0x00007f0000000001 (most recent call first):\n"
        f'  File "{graph.__file__}", line 1 in _engine_run_backward\n'
        f'  File "{script}", line 3 in train\n'
    )
    found = stacks.parse_dump(dump)
    assert found[0] == (str(script), 7, "hook") and found[-1] == (str(script), 3, "train")
    assert not any(name == "_exit_with_caller" for _, _, name in found)
