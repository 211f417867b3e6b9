"""The place where a rank stands: its main thread's stack, from faulthandler's dump of all threads.

While the main thread waits for a backward, the hooks run in autograd's thread on a GPU, so that
thread's stack is put in front. Helper threads, such as the one that reads the lifeline, are
ignored.
"""

from __future__ import annotations

import os
import re
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from shardlab.common import PACKAGES

Frame = tuple[str, int, str]  # file, line, function
Stack = list[Frame]  # innermost first

_LIBRARIES = tuple(
    {sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(torch.__file__).parent), str(Path(__file__).parent)}
)
_COURSE = tuple(f"{Path(__file__).parents[2] / name}{os.sep}" for name in PACKAGES)

_HEAD = re.compile(r"^(?:Current thread|Thread|Stack) .*\(most recent call first\):$", re.MULTILINE)
_LINE = re.compile(r'File "(.*)", line (\d+) in (.*)')


def await_dumps(files: list[Path]) -> None:
    """Wait until the ranks have written their stacks, each into its file, for at most a second."""
    deadline = time.monotonic() + 1.0
    before: list[int] = []
    sizes = [_size(file) for file in files]
    while time.monotonic() < deadline and (sizes != before or 0 in sizes):
        time.sleep(0.01)  # a dump ends when its file stops growing: there is no other mark
        before, sizes = sizes, [_size(file) for file in files]


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def own(frames: list[Any]) -> list[Any]:
    """Return the frames outside of libraries: the reader's and the course's."""
    return [frame for frame in frames if not frame[0].startswith((*_LIBRARIES, "<"))]


def readers(frames: list[Any]) -> list[Any]:
    """Return the reader's frames alone."""
    return [frame for frame in own(frames) if not frame[0].startswith(_COURSE)]


def read(text: str) -> Stack:
    """Parse faulthandler's output into the stack that shows where a rank stands."""
    # After a fatal signal, use the last dump: the stack of the thread that died.
    dumps = _HEAD.split(text.rpartition("Fatal Python error")[2])[1:]
    threads = [
        [(m[1], int(m[2]), m[3]) for m in map(_LINE.search, dump.splitlines()) if m]
        for dump in dumps
    ]
    *others, main = threads or [[]]  # newest thread first, main thread last
    if main and main[0][2] == "_engine_run_backward":
        # Python's own threads begin in `_bootstrap`, autograd's threads do not.
        own_code = (t for t in others if t and t[-1][2] != "_bootstrap" and own(t))
        return next(own_code, []) + main
    return main
