"""Exercises of the lesson `checkpoint`."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import add_cases, add_number, call_answer, make_isclose
from shardlab.checkpoint import best_interval

_PARAMETERS = 8.03e9
add_number("checkpoint_bytes", 12 * _PARAMETERS, "bytes", rel_tol=0.005,
       success="Right: 4 bytes each for the weight and for AdamW's two averages, 96 GB together.",
       hints={
    4 * _PARAMETERS: "Those are the weights alone: a resumed run needs the optimizer states, too.",
    16 * _PARAMETERS: "Gradients are computed anew in the next step: they are not saved.",
})  # fmt: skip
add_number("checkpoint_interval", 5692.1, "s", rel_tol=0.005,
       success="Right: every 95 minutes, although a failure comes only once in two days.", hints={
    4024.9: "A factor is missing under the root: on average half an interval is lost.",
    94.87: "Convert the 50 hours to seconds, and give the answer in seconds.",
})  # fmt: skip

# Shorter than the buffer of a Python file: nothing is in the file before a flush.
_OLD, _NEW = b"the weights of step 500\n" * 50, b"the weights of step 600\n" * 60


def _run_and_kill(answer: Callable[..., Any], path: Path, line: int) -> int:
    """Call the answer in a child process that is killed before its `line`-th line of Python.

    Returns the exit status: 0 if the answer returned, 1 if it raised, negative if it was killed.
    """
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        left = [line]

        def trace_line(_frame: Any, event: str, _argument: Any) -> Any:
            if event == "line":
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
            return trace_line

        gc.disable()  # its callbacks are Python code, and their lines would be counted, too
        try:
            sys.settrace(trace_line)
            answer(path, _NEW)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@add_exercise("my_write")
def _(answer: Callable[..., Any]) -> str:
    kills = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "current.pt"
        path.write_bytes(_OLD)
        synced = []  # (bytes, whether it is at `path` already) of each file that fsync writes

        def record_fsync(file: Any, fsync: Callable[[Any], None] = os.fsync) -> None:
            status = os.fstat(file if isinstance(file, int) else file.fileno())
            at_path = path.exists() and os.path.samestat(status, path.stat())
            synced.append((status.st_size, at_path))
            fsync(file)

        with mock.patch.object(os, "fsync", record_fsync):
            call_answer(answer, path, _NEW)
        if not path.exists() or path.read_bytes() != _NEW:
            raise WrongAnswer("Without a kill, the file does not have the new content.")
        for line in range(2000):
            path.write_bytes(_OLD)
            status = _run_and_kill(answer, path, line)
            if status > 0:
                raise WrongAnswer(
                    "After a save that was killed, the next save raises: it does not expect the "
                    "file that the killed save left behind."
                )
            if status == 0:
                break
            kills += 1
            left = path.read_bytes() if path.exists() else None
            if left is None:
                raise WrongAnswer(
                    f"Killed before its line number {line}, it leaves no file at all: the old one "
                    "must stay until the new one replaces it atomically."
                )
            if left not in (_OLD, _NEW):
                raise WrongAnswer(
                    f"Killed before its line number {line}, it leaves a file of {len(left):,} "
                    "bytes, neither the old content nor the new: write it somewhere else first."
                )
    if (len(_NEW), False) not in synced:
        raise WrongAnswer(
            "A kill does no harm. But a loss of power does: the rename may reach the disk before "
            "the content does. What makes Python, then the kernel, write all of a file to the "
            "disk, and when is it too late?"
        )
    return f"Right: killed at {kills} moments, and there was always a complete file."


def _join_windows(answer: Callable, samples: int, batch: int, size: int) -> list[int] | None:
    parts = [answer(samples, batch, rank, size) for rank in range(size)]
    if None in parts:
        return None
    for rank, part in enumerate(parts):
        if len(part) != batch // size:
            raise ValueError(
                f"rank {rank} gets {len(part)} windows instead of {batch // size}: the batch is "
                "that of all ranks together"
            )
    return sorted(int(window) for part in parts for window in part)


add_cases(
    "my_windows",
    [(8 * step, 8, size) for step, size in enumerate((4, 4, 4, 2, 2, 1, 8, 8))],
    lambda samples, batch, size: list(range(samples, samples + batch)),
    call=_join_windows,
    success="Right: 4, 2, 1 and 8 ranks go through the data one after the other, each window once.",
    mistakes={
        "It begins at the beginning of the data again.": lambda samples, batch, size: list(
            range(batch)
        )
    },
)


# Shape of a matrix, and the grids of ranks that held it when it was saved and when it is loaded.
_RESHARDINGS = (
    ((8, 6), (4, 1), (2, 1)),
    ((8, 6), (2, 2), (4, 1)),
    ((7, 5), (1, 3), (3, 2)),
    ((9, 8), (2, 4), (3, 1)),
)

_Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, size), each as (rows, columns)


def _list_boxes(shape: tuple[int, int], cut: tuple[int, int]) -> list[_Box]:
    """Return the boxes of all ranks when `shape` is cut as torch cuts it; some may be empty."""

    def parts(length: int, pieces: int) -> list[tuple[int, int]]:
        each = -(-length // pieces)
        ends = [min(i * each, length) for i in range(pieces + 1)]
        return [(first, last - first) for first, last in pairwise(ends)]

    both = product(parts(shape[0], cut[0]), parts(shape[1], cut[1]))
    return [((row, column), (rows, columns)) for (row, rows), (column, columns) in both]


def _slice_box(full: torch.Tensor, box: _Box) -> torch.Tensor:
    (row, column), (rows, columns) = box
    return full[row : row + rows, column : column + columns]


def _make_matrix(shape: tuple[int, int]) -> torch.Tensor:
    return torch.arange(shape[0] * shape[1]).view(shape)


def _apply_plan(
    answer: Callable[..., Any], shape: tuple[int, int], old: tuple[int, int], box: _Box
) -> list[list[int]] | None:
    """Return what the answer's plan reads into `box` of a matrix saved by a grid `old` of ranks."""
    files = {f"{i}.pt": stored for i, stored in enumerate(_list_boxes(shape, old))}
    plan = answer([(file, *stored) for file, stored in files.items()], *box)
    if plan is None:
        return None
    found = torch.full_like(_slice_box(_make_matrix(shape), box), -1)
    for file, theirs, mine in plan:
        source = _slice_box(_make_matrix(shape), files[file])[theirs]
        if not source.numel():
            raise ValueError(f"nothing of {file} is read: leave it out")
        if source.shape != found[mine].shape:
            raise ValueError(f"{file}: theirs and mine are counted each from its own box's corner")
        found[mine] = source
    return found.tolist()


add_cases(
    "my_pieces",
    [(shape, old, box) for shape, old, new in _RESHARDINGS for box in _list_boxes(shape, new)],
    lambda shape, old, box: _slice_box(_make_matrix(shape), box).tolist(),
    call=_apply_plan,
    success="Right: cut by rows, by columns and by both, also where they do not divide.",
)


def _compute_interval(
    size: float, ranks: int, copy: float, write: float, mtbf: float, mistake: str = ""
) -> float:
    """Return the best interval, or a mistake ("whole" copies all states, "young" no storage)."""
    best = best_interval(size / (1 if mistake == "whole" else ranks) / copy, mtbf)
    return best if mistake == "young" else max(best, size / write)


add_cases(
    "my_save_interval",
    # Bytes, ranks, bytes/s from a rank to its host, bytes/s from all ranks to storage, seconds
    # between two failures of the job. First case: storage keeps up with the best interval.
    ((96e9, 64, 20e9, 25e9, 154_800.0), (12e12, 1024, 20e9, 10e9, 14_400.0)),
    _compute_interval,
    equal=make_isclose(1e-3),
    success="Right: from Young's rule where storage keeps up, and from storage where it does not.",
    mistakes={
        "The previous save is not written by then: there is a shortest interval, too.": partial(
            _compute_interval, mistake="young"
        ),
        "Each rank copies its own share, all at once.": partial(_compute_interval, mistake="whole"),
    },
)
