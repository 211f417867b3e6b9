"""Warnings about files of the course that changed after this process imported them.

A notebook's kernel runs the code that it imported, but `show.source` reads the file: the page would
show new code and run old code. So `show.source` and `ranks.run` call `notice`.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType
from typing import Any

from . import PACKAGES

_BEGIN = time.time()  # files that are older have not changed since their import
_seen: dict[str, tuple[Any, tuple[int, int]]] = {}  # module -> its spec, (mtime, size) at import
_said: set[str] = set()


def notice() -> None:
    """Print a warning, once per file, for each file of the course changed since its import."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or name.partition(".")[0] not in PACKAGES or path in _said:
            continue
        try:
            stat = os.stat(path)
        except OSError:
            continue
        now = int(stat.st_mtime), stat.st_size
        spec = module.__spec__
        if name not in _seen or _seen[name][0] is not spec:  # new or reloaded
            _seen[name] = spec, _imported(module, now) if stat.st_mtime > _BEGIN else now
        if now != _seen[name][1]:
            _said.add(path)
            words = "has changed since it was imported: restart the kernel to run the new code"
            print(f"{path} {words}", file=sys.stderr)


def _imported(module: ModuleType, now: tuple[int, int]) -> tuple[int, int]:
    """Return mtime and size of the imported file, from the header of its compiled .pyc file."""
    try:
        with open(module.__cached__, "rb") as file:
            head = file.read(16)
    except (AttributeError, OSError, TypeError):
        return now
    numbers = [int.from_bytes(head[i : i + 4], "little") for i in (4, 8, 12)]
    return (numbers[1], numbers[2]) if not numbers[0] else now
