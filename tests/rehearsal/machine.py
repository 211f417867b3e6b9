"""Pretended machine, and the handling of findings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

_OURS = str(Path(__file__).parent)
_DRIVES = str(Path(__file__).parent / "drives")
_LIBRARIES = ("site-packages", "/lib/python3", "<frozen", "shardlab/ranks/worker.py")


KIND = os.environ.get("REHEARSE_DEVICE", "cuda")  # torch's name of these GPUs: "xpu" for Intel's
CARRIER = {"cuda": "nccl", "xpu": "xccl"}[KIND]  # the backend of their messages


class Refused(Exception):
    """Error for a fault that a GPU does not report. It is no RuntimeError, which nccl raises."""


class Machine:
    """State of the pretended GPUs in this process."""

    gpus = 1
    capability = (8, 0)
    total = 16 * 10**9  # bytes of each GPU
    flops = 3e10  # larger products have a shape, and no numbers
    patience = 30.0  # seconds that one end of a connection waits for the other
    forking = bool(os.environ.get("REHEARSE_FORK"))
    current = 0  # the current device
    initialized = False  # this process has used CUDA
    forked = False  # its parent had used CUDA
    launched = 0  # operations launched on a GPU
    unfinished = 0  # launched operations that the host has not waited for

    def touch(self) -> None:
        """Use CUDA; raise an error if the parent process used it before the fork."""
        if self.forking:
            return
        if self.forked:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
                "you must use the 'spawn' start method"
            )
        self.initialized = True

    def launch(self) -> None:
        """Launch an operation on the GPU."""
        self.launched += 1
        self.unfinished += 1


HERE = Machine()


# --- findings


def find(kind: str, text: str, error: Callable[[str], Exception] = RuntimeError) -> NoReturn:
    """Report a fault: log it, and raise it as CUDA or nccl would, with its kind first."""
    if path := os.environ.get("REHEARSE_LOG"):
        places = " < ".join(places_of_the_reader()[:4])
        with open(path, "a") as file:
            file.write(
                f"[rehearsal: {kind}] {text} at {places}\n".replace("\n", " ").strip() + "\n"
            )
    raise error(f"[rehearsal: {kind}] {text}")


def report_fault(kind: str, text: str) -> None:
    """Report a fault that CUDA would not notice."""
    find(kind, text, Refused)


def places_of_the_reader() -> list[str]:
    """Return the lines of the course, or of its user, that led here; innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame:
        file = frame.f_code.co_filename
        if not is_own_file(file) and not any(part in file for part in _LIBRARIES):
            found.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def place() -> str:
    """Return the innermost line of these."""
    return next(iter(places_of_the_reader()), "an unknown place")


def is_own_file(file: str) -> bool:
    """Return True if a file belongs to the rehearsal; drives count as its users."""
    return file.startswith(_OURS) and not file.startswith(_DRIVES)


# --- the host waits

_listeners: list[list[str]] = []


def host_waits() -> None:
    """Record that the host waits for the GPU here."""
    for listener in _listeners:
        listener.append(place())


@contextmanager
def collect_waits() -> Iterator[list[str]]:
    """Collect the places where the host waits for a GPU inside: none, on a hot path."""
    found: list[str] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners.remove(found)
