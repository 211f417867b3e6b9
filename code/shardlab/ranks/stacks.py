"""Where a rank stands: what faulthandler wrote of its threads, read as one stack.

A rank works in its main thread. When that waits for another thread, the rank stands where the other
one does: the hooks of a backward on a GPU run in a thread of autograd's, and code may start threads
of its own. Threads that merely help, such as the one that holds the lifeline, tell nothing.
"""

from __future__ import annotations

import concurrent.futures._base
import os
import queue
import re
import sysconfig
import threading
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
# Python's own, in which a thread waits for another one, never for another rank.
THREADING = {threading.__file__, queue.__file__, concurrent.futures._base.__file__}

_HEAD = re.compile(r"^(?:Current thread|Thread|Stack) .*\(most recent call first\):$", re.MULTILINE)
_LINE = re.compile(r'File "(.*)", line (\d+) in (.*)')


def await_dumps(files: list[Path], patience: float = 1.0) -> None:
    """Return when ranks have written their stacks, each into its file."""
    deadline = time.monotonic() + patience
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
    return _awaited(main, [thread for thread in others if thread]) + main


def _awaited(main: Stack, others: list[Stack]) -> Stack:
    """The thread for which the main one waits, as far as stacks tell; otherwise nothing."""
    if not main:
        return []
    file, _, function = main[0]
    by_python = [thread for thread in others if thread[-1][2] == "_bootstrap"]
    if function == "_engine_run_backward":
        found = [thread for thread in others if thread not in by_python and own(thread)]
    elif file in THREADING:
        found = [thread for thread in by_python if readers(thread)]
    else:
        return []
    # Of several, one that does not wait for a thread itself.
    return min(found, key=lambda thread: thread[0][0] in THREADING, default=[])
