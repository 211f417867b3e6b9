"""Runs the three jobs that hang, looks at each from outside, and writes down what is seen.

    python -m shardlab.cluster.captured.capture            # rewrites the texts beside this file
    python -m shardlab.cluster.captured.capture order      # of one job alone

Every job is a script of this folder. Each of its ranks is an interpreter of its own, started with
what srun would set; all talk over the loopback interface. When every rank has left its record of
the flight recorder, py-spy looks at each, and then all are ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardlab.cluster import flight

from . import FOLDER

RANKS = {"uneven": 3, "order": 2, "tensor": 2}
LAST = {"uneven": 5, "order": 5, "tensor": 9}  # calls of each rank that the text shows
PATIENCE = 120.0  # seconds until the jobs stand still


@dataclass(frozen=True)
class Seen:
    """What can be seen of a job that hangs."""

    printed: str
    calls: dict[int, list[flight.Call]]
    stacks: dict[int, str]  # what py-spy prints of each rank; empty where there is no py-spy


def look(*names: str) -> dict[str, Seen]:
    """Run the jobs side by side until they hang, look, and end them.

    Raises ValueError for another name, and RuntimeError for a job that does not hang.
    """
    for name in names:
        if name not in RANKS:
            raise ValueError(f"name={name!r}: allowed are {', '.join(RANKS)}")
    with tempfile.TemporaryDirectory(prefix="hang-") as folder:
        started: dict[str, list[subprocess.Popen[bytes]]] = {}
        try:
            for name in names:
                (Path(folder) / name).mkdir()
                started[name] = [
                    _start(name, rank, Path(folder) / name) for rank in range(RANKS[name])
                ]
            return {name: _look(Path(folder) / name, ranks) for name, ranks in started.items()}
        finally:
            for process in [process for ranks in started.values() for process in ranks]:
                process.kill()
                process.wait()


def _start(name: str, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS[name]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Python draws the order of a set anew in each process; these two differ in the job's.
        "PYTHONHASHSEED": str(1 + rank),
        "PYTHONPATH": str(FOLDER.parents[2]),
    }
    command = [sys.executable, "-W", "ignore", str(FOLDER / f"{name}.py"), str(folder)]
    with (folder / f"{rank}.out").open("wb") as out:
        return subprocess.Popen(command, env=os.environ | own, stdout=out, stderr=out)


def _look(folder: Path, ranks: Sequence[subprocess.Popen[bytes]]) -> Seen:
    deadline = time.monotonic() + PATIENCE
    while len(list((folder / "flight").glob(f"{flight.PREFIX}*"))) < len(ranks):
        printed = "".join((folder / f"{r}.out").read_text() for r in range(len(ranks)))
        if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
            raise RuntimeError(f"{folder.name} did not hang:\n{printed}")
        time.sleep(0.1)
    printed = "".join((folder / f"{r}.out").read_text() for r in range(len(ranks)))
    stacks = {rank: _stack(process.pid) for rank, process in enumerate(ranks)}
    return Seen(printed, flight.read(folder / "flight"), stacks)


def _stack(pid: int) -> str:
    """The main thread's frames, innermost first; of torch's, the innermost alone."""
    found = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not found:
        return ""
    command = [found, "dump", "--pid", str(pid)]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    main = dumped.partition("MainThread")[2].split("\nThread ")[0].splitlines()[1:]
    return "\n".join(main[:1] + [line for line in main[1:] if "(torch/" not in line])


def text(name: str, seen: Seen) -> str:
    """What the reader gets to read."""
    size = RANKS[name]
    head = f"{name}.py, {size} ranks, gloo, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    parts = [head, f"== printed ==\n{seen.printed.strip()}"]
    for rank in range(size):
        parts.append(
            f"== py-spy dump, rank {rank}, torch's inner frames left out ==\n{seen.stacks[rank]}"
        )
    last = LAST[name]
    shown = "\n".join(str(call) for rank in range(size) for call in seen.calls[rank][-last:])
    parts.append(f"== flight recorder, the last {last} calls of each rank ==\n{shown}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the texts of the jobs that the command line names, or of all."""
    names = sys.argv[1:] or list(RANKS)
    for name, seen in look(*names).items():
        if not all(seen.stacks.values()):
            raise SystemExit("py-spy found nothing: is it installed, and may it trace?")
        (FOLDER / f"{name}.txt").write_text(text(name, seen), "utf-8")


if __name__ == "__main__":
    main()
