"""Run the course's command line inside a test."""

from __future__ import annotations

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
