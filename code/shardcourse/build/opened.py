"""Which of the course's files a page's processes open while it is executed.

What sources name is found by reading them (`key`); a name that is made up at run time, by a loop
over a folder or by joining its parts, shows only here. Python tells an audit hook of every file
that it opens (PEP 578). A process gets the hook from a `sitecustomize.py` on its PYTHONPATH, forks
inherit it: so the kernel, its ranks and the commands that cells start are all heard.

Code that is imported counts by its name in a source alone: to find one exercise, `check` imports
those of all topics, and with them the whole course.
"""

from __future__ import annotations

import os
from pathlib import Path

# Each process appends what it has not yet seen. A file that is kept open would not do: a rank may
# close all that it inherits, and its number could be another file's by then.
_HOOK = '''\
"""Notes the files below {root!r} that this process opens."""
import importlib.machinery
import importlib.util
import os
import sys

WRITES = os.O_WRONLY | os.O_RDWR
IMPORTS = "importlib._bootstrap_external"  # the standard library's importer, as its files call it
seen = set()


def note(event, arguments):
    if event != "open" or not isinstance(arguments[0], (str, bytes)):
        return
    try:
        path = os.path.abspath(os.fsdecode(arguments[0]))
        told = "w" if arguments[2] & WRITES else "r"
        if path.startswith({root!r}) and (told, path) not in seen:
            if IMPORTS in sys._getframe(1).f_code.co_filename:
                return
            seen.add((told, path))
            with open({log!r}, "ab") as log:
                log.write(os.fsencode(f"{{told}} {{path}}\\0"))
    except (OSError, ValueError):  # the page is done and the log gone; a folder gone from below
        pass


sys.addaudithook(note)
# The one that this one hides.
others = [path for path in sys.path if path != os.path.dirname(__file__)]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec and spec.loader:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
'''


class Log:
    """What processes open below `root`, noted in `folder`, which goes first on their PYTHONPATH."""

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder = root, folder
        self.path = folder / "opened"
        hook = _HOOK.format(root=f"{root}{os.sep}", log=str(self.path))
        (folder / "sitecustomize.py").write_text(hook, "utf-8")

    def files(self) -> list[str]:
        """The paths below the root of files that were read and never written, sorted.

        Left out: what is hidden (an environment, git's), what was built or installed, and what is
        gone again.
        """
        found: dict[str, set[str]] = {"r": set(), "w": set()}
        data = self.path.read_bytes() if self.path.exists() else b""
        for line in filter(None, data.split(b"\0")):
            told, _, path = os.fsdecode(line).partition(" ")
            found[told].add(os.path.relpath(path, self.root))
        read = found["r"] - found["w"]
        return sorted(path for path in read if _kept(path) and (self.root / path).is_file())


def _kept(path: str) -> bool:
    parts = Path(path).parts
    return not any(part.startswith((".", "_build")) or part.endswith(".egg-info") for part in parts)
