"""The stack of a rank's main thread, from faulthandler's dump of all threads.

While the main thread waits for a backward, the hooks run in autograd's thread on a GPU, so that
thread's stack is put in front. Helper threads are ignored.
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

_LIBRARY_PATHS = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(torch.__file__).parent), str(Path(__file__).parent)}
)
_COURSE_PATHS = tuple(f"{Path(__file__).parents[2] / name}{os.sep}" for name in PACKAGES)

_THREAD_HEADER = re.compile(r"(?m)^(?:Current thread|Thread|Stack) .*\(most recent call first\):$")
_FRAME_LINE = re.compile(r'File "(.*)", line (\d+) in (.*)')


def wait_for_dumps(files: list[Path]) -> None:
    """Wait until the ranks have written their stacks, each into its file, for at most a second."""
    deadline = time.monotonic() + 1.0
    previous: list[int] = []
    sizes = [_get_file_size(file) for file in files]
    while time.monotonic() < deadline and (sizes != previous or 0 in sizes):
        time.sleep(0.01)  # a dump is complete when its file stops growing: there is no other sign
        previous, sizes = sizes, [_get_file_size(file) for file in files]


def _get_file_size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def drop_library_frames(frames: list[Any]) -> list[Any]:
    """Return the frames of the user's code and of the course's."""
    return [frame for frame in frames if not frame[0].startswith((*_LIBRARY_PATHS, "<"))]


def drop_course_frames(frames: list[Any]) -> list[Any]:
    """Return the frames outside of the course's packages."""
    return [frame for frame in frames if not frame[0].startswith(_COURSE_PATHS)]


def parse_dump(text: str) -> Stack:
    """Parse faulthandler's output into the stack of the rank's main thread."""
    # After a fatal signal, use the last dump: the stack of the thread that died.
    dumps = _THREAD_HEADER.split(text.rpartition("Fatal Python error")[2])[1:]
    threads = [
        [(m[1], int(m[2]), m[3]) for m in map(_FRAME_LINE.search, dump.splitlines()) if m]
        for dump in dumps
    ]
    *others, main = threads or [[]]  # newest thread first, main thread last
    if main and main[0][2] == "_engine_run_backward":
        # Python's own threads begin in `_bootstrap`, autograd's threads do not.
        own_code = (t for t in others if t and t[-1][2] != "_bootstrap" and drop_library_frames(t))
        return next(own_code, []) + main
    return main
