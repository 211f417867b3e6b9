"""Processes that outlive the one that starts them: noted in a folder, found again, and ended.

A process number alone may be another one's by tomorrow; with the moment of its birth it is not.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

NOTED = "daemons"  # a file: number and birth of each, the first one first
_OURS: list[subprocess.Popen[bytes]] = []  # kept, so that each is reaped when it ends


def start(folder: Path, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
    """Start `command` in `folder`, in a session of its own; what it prints goes to log/NAME.out."""
    with open(folder / f"log/{name}.out", "wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    _OURS.append(process)
    born = repr(psutil.Process(process.pid).create_time())
    noted = {line[2]: line for line in _noted(folder)} | {name: [str(process.pid), born, name]}
    (folder / NOTED).write_text("".join(" ".join(line) + "\n" for line in noted.values()))


def alive(folder: Path) -> list[psutil.Process]:
    """Those that run, of all that were started in `folder`."""
    return list(named(folder).values())


def named(folder: Path) -> dict[str, psutil.Process]:
    """Those that run, by the names under which they were started; the first one first."""
    found = {name: _process(int(pid), float(born)) for pid, born, name in _noted(folder)}
    return {name: process for name, process in found.items() if process}


def ended(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of `names` that were started and run no more, each with the last that it printed.

    One that was started again counts as it is now.
    """
    found, among = [], set(names)
    for pid, born, name in _noted(folder):
        if name in among and _process(int(pid), float(born)) is None:
            said = (folder / f"log/{name}.out").read_text(errors="replace").split("\n")
            found.append(f"{name} has ended: {' / '.join(line for line in said if line)[-300:]}")
    return found


def end(processes: Iterable[psutil.Process], patience: float = 5.0) -> None:
    """SIGTERM, and SIGKILL to those who need more than `patience` seconds; waits for the end."""
    left = list(processes)
    for how in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                how(process)
        until = time.monotonic() + patience
        while (left := [p for p in left if running(p)]) and time.monotonic() < until:
            time.sleep(0.02)
    _OURS[:] = [one for one in _OURS if one.poll() is None]


def running(process: psutil.Process) -> bool:
    """Whether it has not ended. One that has, and that its parent did not ask about, has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _noted(folder: Path) -> list[list[str]]:
    noted = folder / NOTED
    return [line.split() for line in noted.read_text().splitlines()] if noted.exists() else []


def _process(pid: int, born: float) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == born and running(process):
            return process
    return None
