"""Warnings about files of the course that changed after this process imported them.

A notebook's kernel runs the code that it imported, but `show.source` reads the file: the page would
show new code and run old code. So both `show.source` and `ranks.run` call
`warn_stale_modules`.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType
from typing import Any

from . import PACKAGES

_START_TIME = time.time()  # files that are older have not changed since their import
_import_stats: dict[str, tuple[Any, tuple[int, int]]] = {}  # module -> spec, (mtime, size)
_warned_paths: set[str] = set()


def warn_stale_modules() -> None:
    """Print a warning, once per file, for each file of the course changed since its import."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or name.partition(".")[0] not in PACKAGES or path in _warned_paths:
            continue
        try:
            stat = os.stat(path)
        except OSError:
            continue
        now = int(stat.st_mtime), stat.st_size
        spec = module.__spec__
        if name not in _import_stats or _import_stats[name][0] is not spec:  # new or reloaded
            is_new = stat.st_mtime > _START_TIME
            _import_stats[name] = spec, _get_import_stat(module, now) if is_new else now
        if now != _import_stats[name][1]:
            _warned_paths.add(path)
            words = "has changed since it was imported: restart the kernel to run the new code"
            print(f"{path} {words}", file=sys.stderr)


def _get_import_stat(module: ModuleType, now: tuple[int, int]) -> tuple[int, int]:
    """Return mtime and size of the imported file, from the header of its compiled .pyc file."""
    try:
        with open(module.__cached__, "rb") as file:
            head = file.read(16)
    except (AttributeError, OSError, TypeError):
        return now
    numbers = [int.from_bytes(head[i : i + 4], "little") for i in (4, 8, 12)]
    return (numbers[1], numbers[2]) if not numbers[0] else now
