"""Options of the commands. A bad value gets one line: its name, the value, and what is allowed.

argparse's own messages name types, not what is allowed. So text that is no number stays text, and
the dataclass or function that uses the value refuses it, as in Python. Files and folders that
options name are checked here: `folder` and `written`; `shardlab.common.files` reads.

Only the standard library is imported.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from shardlab.common.arguments import MAX_QUANTITY, check_integer
from shardlab.common.files import parse_path


class Parser(argparse.ArgumentParser):
    """A parser that reports an unknown option in one line, with the nearest known option."""

    def error(self, message: str) -> Any:
        """End the process with status 2, without argparse's usage text."""
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_known_args(self, *given: Any, **more: Any) -> Any:
        """Parse as argparse does, but refuse unknown options."""
        found, rest = super().parse_known_args(*given, **more)
        if rest:
            near = nearest(rest[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(rest)}{near}")
        return found, rest


def nearest(given: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" if one of the names is similar to the given one, else ""."""
    import difflib  # imported here: only a mistake needs it

    near = difflib.get_close_matches(given, list(known), 1, 0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def any_encoding() -> None:
    """Escape characters that a terminal or a pipe cannot encode, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def command(
    commands: argparse._SubParsersAction, name: str, description: str | None
) -> argparse.ArgumentParser:
    """Add a command. Its short description is in the list of commands."""
    parser = commands.add_parser(
        name,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # "-1.5" is a bad value, not an unknown option: the message must name the option before it.
    parser._negative_number_matcher = re.compile(r"-[.\d]")  # type: ignore[attr-defined]
    return parser


def add(
    parser: argparse.ArgumentParser,
    name: str,
    words: str,
    metavar: str,
    kind: Callable[[str], Any] = str,
) -> None:
    """Add an option with a value, converted to `kind` if possible. A missing value is ""."""
    read = partial(_read, kind)
    parser.add_argument(f"--{name}", nargs="?", const="", help=words, metavar=metavar, type=read)


def flag(parser: Any, name: str, words: str) -> None:
    """Add an option without a value: None unless it is given."""
    parser.add_argument(f"--{name}", action="store_true", default=None, help=words)


def _read(kind: Callable[[str], Any], given: str) -> Any:
    with suppress(ValueError):  # text that cannot be converted is refused later
        return kind(given)
    return given


def given(chosen: argparse.Namespace, kind: Any = None) -> dict[str, Any]:
    """Return the options given, by name; kind: those that are fields of this dataclass."""
    there = {name: value for name, value in vars(chosen).items() if value is not None}
    names = there if kind is None else kind.__dataclass_fields__
    return {name: there[name] for name in names if name in there}


def whole(name: str, given: str | None, least: int = 1, most: int = MAX_QUANTITY) -> int:
    """Return an option's value as a whole number. Raises ValueError, which says what is allowed."""
    value = _read(int, given or "")
    check_integer(least, most, **{name: value})
    return value


def apart(given: Iterable[str], names: Iterable[str], words: str) -> None:
    """Raise ValueError if one of these options is given beside an option that excludes it.

    words: the other option, and what is allowed with it.
    """
    for name in names:
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} {words}")


def one_of(given: Iterable[str], *names: str) -> None:
    """Raise ValueError unless exactly one of these options is given."""
    words, said = " and ".join(f"--{n}" for n in names), [f"--{n}" for n in names if n in given]
    if len(said) != 1:
        raise ValueError(f"{' and '.join(said) or 'neither'}: allowed is exactly one of {words}")


def folder(name: str, given: str | Path) -> Path:
    """Return the folder of an option, made if it is new. Raises ValueError if it is not writable.

    Call it last, when all other options are known to be good.
    """
    path = parse_path(name, given)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        allowed = "allowed are folders that can be written, or made"
        raise ValueError(f"{name}={str(given)!r}: {allowed} ({error.strerror})") from None
    return path


def written(
    name: str,
    given: str | Path,
    write: Callable[[Path], Any] | str | None = None,
    room: bool = False,
) -> Any:
    """Return what `write(path)` returns. Raises ValueError for a file that cannot be written.

    The file is written beside its place and then moved there, so that a reader finds the old one or
    the new one. A link stays, and the file that it leads to is written. write: a function, or a
    text.
    room: make the file's folder, too. Without `write` the place is only tried, before long work
    begins, and nothing is changed.
    """
    allowed = "allowed are files in a folder that exists and can be written"
    path = Path(os.path.realpath(parse_path(name, given)))
    try:
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise PermissionError(13, "a folder, no plain file, or read-only")
        if room:
            path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as beside:
            part = Path(beside, path.name)
            part.touch()
            if write is None:
                return None
            found = part.write_text(write, "utf-8") if isinstance(write, str) else write(part)
            os.replace(part, path)
            return found
    except OSError as error:
        raise ValueError(f"{name}={str(given)!r}: {allowed} ({error.strerror})") from None
