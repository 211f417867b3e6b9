"""Where a rank stands: what faulthandler wrote of its threads, read as one stack.

A rank works in its main thread. When that waits for a backward, the rank stands where autograd's
thread does, in which the hooks run on a GPU. Threads that merely help, such as the one that holds
the lifeline, tell nothing.
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
    """Return when ranks have written their stacks, each into its file, or after a second."""
    deadline = time.monotonic() + 1.0
    before: list[int] = []
    sizes = [_size(file) for file in files]
    while time.monotonic() < deadline and (sizes != before or 0 in sizes):
        time.sleep(0.01)  # a dump is whole when it grows no more: nothing else marks its end
        before, sizes = sizes, [_size(file) for file in files]


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def own(frames: list[Any]) -> list[Any]:
    """Those that are not a library's: the reader's and the course's."""
    return [frame for frame in frames if not frame[0].startswith((*_LIBRARIES, "<"))]


def readers(frames: list[Any]) -> list[Any]:
    """The reader's alone."""
    return [frame for frame in own(frames) if not frame[0].startswith(_COURSE)]


def read(text: str) -> Stack:
    """The stack that tells where a rank stands, from all that faulthandler wrote in it."""
    # A fatal signal's dump comes last, and counts: it is of one thread, the one that died.
    dumps = _HEAD.split(text.rpartition("Fatal Python error")[2])[1:]
    threads = [
        [(m[1], int(m[2]), m[3]) for m in map(_LINE.search, dump.splitlines()) if m]
        for dump in dumps
    ]
    *others, main = threads or [[]]  # the newest thread comes first, and so the main one last
    if main and main[0][2] == "_engine_run_backward":
        # Python's own threads begin in `_bootstrap`, autograd's do not.
        own_code = (t for t in others if t and t[-1][2] != "_bootstrap" and own(t))
        return next(own_code, []) + main
    return main
