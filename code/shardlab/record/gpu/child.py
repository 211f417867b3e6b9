"""One program, run to its end or to a limit, and then ended with everything that it started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork
_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # of prctl
PATIENCE = 10.0  # seconds that a program has for its own cleaning up


def run(
    command: Sequence[str],
    log: Path,
    output: Path,
    seconds: float | None,
    folder: Path,
    environment: Mapping[str, str],
) -> int | None:
    """Run `command` in `folder`; return its exit status, None when `seconds` were over before.

    What it says goes into the file `log`, what it puts out into `output`: they may be the same.
    """
    _adopt_orphans(True)
    others = _descendants(set())
    try:
        with open(log, "ab") as told, open(output, "ab") as put_out:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=put_out,
                stderr=told,
                start_new_session=True,  # the terminal's Ctrl-C comes to us alone
                preexec_fn=_settle_in,
            )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process, others)
    finally:
        _adopt_orphans(False)


def _adopt_orphans(adopt: bool) -> None:
    """Whether what a child leaves behind becomes a child of this process, and so can be found."""
    if _LIBC:
        _LIBC.prctl(_ADOPT_ORPHANS, int(adopt), 0, 0, 0)


def _settle_in() -> None:
    """In the child: hear an interrupt, and die with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _LIBC:
        _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


def _end(process: subprocess.Popen, others: set[int]) -> None:
    """End what still runs of `process` and of all that it started; `others` are not its own."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while left := _descendants(others) | ({process.pid} if process.poll() is None else set()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if pid != process.pid:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:  # in the driver, perhaps: nothing more can be done
            return
        time.sleep(0.02)


def _descendants(others: set[int]) -> set[int]:
    """Process numbers of all that this process started, and of what they did, but for `others`."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended while we looked
            fields = status.read_text("utf-8", "replace").rpartition(")")[2].split()
            parents[int(status.parent.name)] = int(fields[1])
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found - others
        found |= new
    return found
