"""Helpers that run the course's command line, its benchmarks, and its scripts inside a test."""

from __future__ import annotations

import os
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

from shardlab.common import show
from shardtools.__main__ import main


def run_main(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Run `python -m shardlab` with these arguments; return exit status, stdout, stderr."""
    try:
        status = main(list(arguments))
    except SystemExit as end:  # argparse exits like this
        status = end.code
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@cache
def load_bench(topic: str) -> dict[str, Any]:
    folder = show.ROOT / "benchmarks"
    sys.path.insert(0, str(folder))  # for its import of side_by_side
    try:
        return runpy.run_path(str(folder / f"{topic}.py"))
    finally:
        sys.path.pop(0)


def without_jupyter(folder: Path) -> dict[str, str]:
    """Return an environment without Jupyter for Python; `folder` holds the blocking modules."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "for name in ('IPython', 'ipykernel', 'jupyter_client', 'jupytext', 'nbformat'):\n"
        "    sys.modules[name] = None\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
