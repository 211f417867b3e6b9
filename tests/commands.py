"""Run the course's command line, its benchmarks, and its scripts without Jupyter, inside a test."""

from __future__ import annotations

import os
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

from shardlab.common import show
from shardtools.__main__ import main


def ran(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of `python -m shardlab` with these arguments."""
    try:
        status = main(list(arguments))
    except SystemExit as end:  # argparse's own way out
        status = end.code
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@cache
def benchmark(topic: str) -> dict[str, Any]:
    """What a topic's benchmark defines."""
    folder = show.ROOT / "benchmarks"
    sys.path.insert(0, str(folder))  # where it finds side_by_side
    try:
        return runpy.run_path(str(folder / f"{topic}.py"))
    finally:
        sys.path.pop(0)


def without_jupyter(folder: Path) -> dict[str, str]:
    """The environment of a Python that knows nothing of Jupyter; `folder` holds what it takes."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "for name in ('IPython', 'ipykernel', 'jupyter_client', 'jupytext', 'nbformat'):\n"
        "    sys.modules[name] = None\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
