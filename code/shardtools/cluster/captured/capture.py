"""Run three jobs that hang, inspect them from outside, and write the captured texts.

    python -m shardtools.cluster.captured.capture            # rewrite the texts beside this file
    python -m shardtools.cluster.captured.capture order      # rewrite the text of one job

Every job is a script of this folder. Each of its ranks is a process of its own, with the variables
that srun would set; all communicate over the loopback interface. When every rank has written its
flight recorder's record, py-spy dumps each rank's stack, and then all processes are ended.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess as Process
from pathlib import Path

import torch

from shardtools.cluster.watch import flight

from . import FOLDER

NUM_RANKS = {"uneven": 3, "order": 2, "tensor": 2}
NUM_SHOWN_CALLS = {"uneven": 5, "order": 5, "tensor": 9}  # calls of each rank that the text shows
FORK = multiprocessing.get_context("fork")
HANG_SECONDS = 120.0  # the jobs must hang by then


@dataclass(frozen=True)
class CapturedJob:
    """The observations of a job that hangs."""

    printed: str
    calls: dict[int, list[flight.Call]]
    stacks: dict[int, str]  # py-spy's output for each rank; empty without py-spy


def capture_jobs(*names: str) -> dict[str, CapturedJob]:
    """Run the jobs side by side until they hang, observe them, and end them.

    Raises RuntimeError for a job that does not hang.
    """
    import torch._dynamo  # noqa: F401  # an optimizer would import it on each rank, in seconds

    started: dict[str, list[Process]] = {}
    with tempfile.TemporaryDirectory(prefix="hang-") as folder:
        try:
            for name in names:
                (Path(folder) / name).mkdir()
                ranks = [(name, rank, Path(folder) / name) for rank in range(NUM_RANKS[name])]
                started[name] = [FORK.Process(target=_run_rank, args=one) for one in ranks]
                for process in started[name]:
                    process.start()
            return {name: _observe_job(Path(folder) / name, r) for name, r in started.items()}
        finally:
            for process in [process for ranks in started.values() for process in ranks]:
                process.kill()
                process.join()


def _run_rank(name: str, rank: int, folder: Path) -> None:
    """Run as a rank: in this fork, or in a fresh interpreter if the job needs one."""
    out = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = sys.stderr = open(1, "w", closefd=False)
    script, size = str(FOLDER / f"{name}.py"), str(NUM_RANKS[name])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": size, "GLOO_SOCKET_IFNAME": "lo"}
    if name == "order":
        # Python draws the order of a set anew in each interpreter; these two differ in theirs.
        os.environ |= {"PYTHONHASHSEED": str(1 + rank), "PYTHONPATH": str(FOLDER.parents[2])}
        os.execv(sys.executable, [sys.executable, "-W", "ignore", script, str(folder)])
    torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
    sys.argv, sys.path[:0] = [script, str(folder)], [str(FOLDER)]
    runpy.run_path(script, run_name="__main__")


def _observe_job(folder: Path, ranks: Sequence[Process]) -> CapturedJob:
    deadline = time.monotonic() + HANG_SECONDS
    outs = [folder / f"{rank}.out" for rank in range(len(ranks))]
    while not _is_hanging(folder / "flight", len(ranks)):
        if time.monotonic() > deadline or not all(process.is_alive() for process in ranks):
            printed = "".join(out.read_text() for out in outs if out.exists())
            raise RuntimeError(f"{folder.name} did not hang:\n{printed}")
        time.sleep(0.1)
    stacks = {rank: _dump_stack(process.pid) for rank, process in enumerate(ranks)}
    printed = "".join(out.read_text() for out in outs)
    return CapturedJob(printed, flight.read_records(folder / "flight"), stacks)


def _is_hanging(folder: Path, size: int) -> bool:
    """Return True if all ranks wait in the last call of their records.

    A slow step leaves a record, too; it is outdated once another rank has completed the call.
    """
    if len(list(folder.glob(f"{flight.TRACE_PREFIX}*"))) < size:
        return False
    records = flight.read_records(folder).values()
    completed = {(c.group, c.number) for mine in records for c in mine if not c.waiting}
    lasts = [mine[-1] for mine in records]
    return all(last.waiting and (last.group, last.number) not in completed for last in lasts)


def _dump_stack(pid: int) -> str:
    """Return the main thread's innermost frame, and those of the scripts, innermost first."""
    found = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not found:
        return ""
    command = [found, "dump", "--pid", str(pid)]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    main = dumped.partition("MainThread")[2].split("\nThread ")[0].splitlines()[1:]
    return "\n".join(
        main[:1] + [line for line in main[1:] if "captured/" in line and "capture.py" not in line]
    )


def format_capture(name: str, job: CapturedJob) -> str:
    """Format the observations of a job as the captured text."""
    size = NUM_RANKS[name]
    head = f"{name}.py, {size} ranks, gloo, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    parts = [head, f"== printed ==\n{job.printed.strip()}"]
    for rank in range(size):
        what = f"py-spy dump, rank {rank}: the innermost frame, and the script's"
        parts.append(f"== {what} ==\n{job.stacks[rank]}")
    shown_calls = NUM_SHOWN_CALLS[name]
    shown = "\n".join(str(call) for rank in range(size) for call in job.calls[rank][-shown_calls:])
    parts.append(f"== flight recorder, the last {shown_calls} calls of each rank ==\n{shown}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the texts of the jobs that the command line names, or of all jobs."""
    names = sys.argv[1:] or list(NUM_RANKS)
    for name, seen in capture_jobs(*names).items():
        if not all(seen.stacks.values()):
            raise SystemExit("py-spy printed nothing: install it, and allow tracing (ptrace)")
        (FOLDER / f"{name}.txt").write_text(format_capture(name, seen), "utf-8")


if __name__ == "__main__":
    main()
