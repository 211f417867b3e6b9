"""Run the course's command line inside a test, and its scripts without Jupyter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardlab.__main__ import main


def ran(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of `python -m shardlab` with these arguments."""
    try:
        status = main(list(arguments))
    except SystemExit as end:  # argparse's own way out
        status = end.code
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def without_jupyter(folder: Path) -> dict[str, str]:
    """The environment of a Python that knows nothing of Jupyter; `folder` holds what it takes."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "for name in ('IPython', 'ipykernel', 'jupyter_client', 'jupytext', 'nbformat'):\n"
        "    sys.modules[name] = None\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}
