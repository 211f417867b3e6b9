"""One program, run to its end or to a limit, and then ended with everything that it started."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import psutil

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork
_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # of prctl
PATIENCE = 10.0  # seconds that a program has for its own cleaning up


def run(
    command: Sequence[str],
    log: Path | None,
    output: Path | None,
    seconds: float | None,
    folder: Path,
    environment: Mapping[str, str],
    patience: float = PATIENCE,
) -> int | None:
    """Run `command` in `folder`; return its exit status, None when `seconds` were over before.

    What it says goes into the file `log`, what it puts out into `output`: they may be the same,
    and None is where this process's own goes. It has `patience` seconds for its own cleaning up.
    """
    others = _started()
    adopt_orphans(True)
    try:
        with _file(log) as told, _file(output) as put_out:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=put_out,
                stderr=told,
                start_new_session=True,  # the terminal's Ctrl-C comes to us alone
                preexec_fn=die_with_parent,
            )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if patience and process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
            end_started(others)
    finally:
        adopt_orphans(False)


def _file(path: Path | None) -> AbstractContextManager:
    return open(path, "ab") if path else nullcontext()


def _prctl(what: int, value: int) -> None:
    if _LIBC:
        _LIBC.prctl(what, value, 0, 0, 0)


def adopt_orphans(yes: bool) -> None:
    """Make what a child leaves behind this process's own child, so that it can be found."""
    _prctl(_ADOPT_ORPHANS, int(yes))


def die_with_parent() -> None:
    """Have a child, before its program starts, hear an interrupt and die with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _started() -> set[psutil.Process]:
    """Return all that this process started, and what that started."""
    return set(psutil.Process().children(recursive=True))


def end_started(others: set[psutil.Process] = frozenset()) -> None:
    """Kill all that this process started but `others`."""
    deadline = time.monotonic() + PATIENCE  # in the driver, perhaps: nothing more can be done
    while (left := _started() - others) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.1)
