"""Options of the commands. A bad value gets one line: its name, the value, and what is allowed.

argparse's own messages name types, not what is allowed, and stop at the first character of a
negative number. So values arrive as text here, and their module judges them.

The standard library alone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def command(
    commands: argparse._SubParsersAction, name: str, words: str, description: str | None
) -> argparse.ArgumentParser:
    """A new command: `words` in the list of commands, `description` in its own help."""
    parser = commands.add_parser(
        name,
        help=words,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # "-1.5" is a bad value, not an unknown option: let the message name the option before it.
    parser._negative_number_matcher = re.compile(r"-[.\d]")  # type: ignore[attr-defined]
    return parser


def add(parser: argparse.ArgumentParser, name: str, words: str, metavar: str) -> None:
    """An option with a value. One that is missing arrives as "", and is judged like any other."""
    parser.add_argument(f"--{name}", nargs="?", const="", help=words, metavar=metavar)


def number(
    name: str, given: str | None, allowed: str = "numbers", kind: Callable[[str], Any] = float
) -> Any:
    """The value of an option as a number of that kind. Raises ValueError, which names it."""
    try:
        return kind(given or "")
    except ValueError:
        raise ValueError(f"{name}={given or ''!r}: allowed are {allowed}") from None


def whole(
    name: str, given: str | None, least: int = 1, allowed: str = "whole numbers above 0"
) -> int:
    """The value of an option as a whole number. Raises ValueError, which says what is allowed."""
    value = number(name, given, allowed, int)
    if value < least:
        raise ValueError(f"{name}={value}: allowed are {allowed}")
    return value


def written(name: str, given: str | Path, write: Callable[[Path], Any] | None = None) -> Any:
    """What `write(path)` returns; ValueError where the file that an option names cannot be written.

    Without `write` it is only tried, before long work begins, and nothing is left or changed.
    """
    path = Path(given)
    try:
        return (write or _tried)(path)
    except OSError as error:
        allowed = "allowed are files in a folder that exists and can be written"
        raise ValueError(f"{name}={str(given)!r}: {allowed} ({error.strerror})") from None


def _tried(path: Path) -> None:
    new = not path.exists()
    with open(path, "ab"):
        pass
    if new:
        path.unlink()
