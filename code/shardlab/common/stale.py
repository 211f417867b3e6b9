"""Notices that a file of the course has changed since this process imported it.

A notebook's kernel goes on with what it imported, while `show.source` reads the file: then the page
would print new code and run the old. So `show.source` and `ranks.run` ask here.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType
from typing import Any

from . import PACKAGES

_BEGIN = time.time()  # what is older than this was imported as it is
_seen: dict[str, tuple[Any, tuple[int, int]]] = {}  # module -> its spec, the file that was imported
_said: set[str] = set()


def notice() -> None:
    """Say, once for each file, which files of the course have changed since they were imported."""
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
        if name not in _seen or _seen[name][0] is not spec:  # new, or loaded again
            _seen[name] = spec, _imported(module, now) if stat.st_mtime > _BEGIN else now
        if now != _seen[name][1]:
            _said.add(path)
            words = "has changed since it was imported: restart the kernel to run the new code"
            print(f"{path} {words}", file=sys.stderr)


def _imported(module: ModuleType, now: tuple[int, int]) -> tuple[int, int]:
    """Time and size of the file that was imported: what Python wrote into the compiled one."""
    try:
        with open(module.__cached__, "rb") as file:
            head = file.read(16)
    except (AttributeError, OSError, TypeError):
        return now
    numbers = [int.from_bytes(head[i : i + 4], "little") for i in (4, 8, 12)]
    return (numbers[1], numbers[2]) if not numbers[0] else now
