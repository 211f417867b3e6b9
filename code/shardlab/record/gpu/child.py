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
    _prctl(_ADOPT_ORPHANS, 1)  # what a child leaves behind becomes ours, and so can be found
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
                preexec_fn=_settle_in,
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
            _end(others)
    finally:
        _prctl(_ADOPT_ORPHANS, 0)


def _file(path: Path | None) -> AbstractContextManager:
    return open(path, "ab") if path else nullcontext()


def _prctl(what: int, value: int) -> None:
    if _LIBC:
        _LIBC.prctl(what, value, 0, 0, 0)


def _settle_in() -> None:
    """In the child: hear an interrupt, and die with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _started() -> set[psutil.Process]:
    """All that this process started, and what they did."""
    return set(psutil.Process().children(recursive=True))


def _end(others: set[psutil.Process]) -> None:
    """End all that this process started but `others`."""
    deadline = time.monotonic() + PATIENCE  # in the driver, perhaps: nothing more can be done
    while (left := _started() - others) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.1)
