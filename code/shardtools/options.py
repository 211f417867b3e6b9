"""Options of the commands. A bad value gets one line: its name, the value, and what is allowed.

argparse's own messages name types, not what is allowed, and stop at the first character of a
negative number. So values arrive as text here, and their module judges them. What an option names
in the file system is judged here as well: `folder` and `written`; `files` reads.

The standard library alone.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardlab.common.arguments import MOST, check_whole, told
from shardlab.common.files import place

_LIKENESS = {
    "×": "x", "·": ".", "→": "->", "–": "-", "─": "-", "…": "...", "’": "'", "µ": "u", "±": "+-",
    "²": "^2", "«": "<<", "»": ">>", "“": '"', "”": '"', "≥": ">=", "≤": "<=",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Says in one line what it does not know, and which of its options is the nearest."""

    def error(self, message: str) -> Any:
        """End the process with status 2; argparse would print how all is used first."""
        self.exit(2, f"{self.prog}: {message}\n")

    def print_help(self, file: Any = None) -> None:
        """Raises OSError where it cannot be written; argparse would end as if it had been."""
        (file or sys.stdout).write(self.format_help())

    def parse_known_args(self, *given: Any, **more: Any) -> Any:
        """As of any parser, but here nothing is left: whoever asked for it hears what is wrong."""
        found, rest = super().parse_known_args(*given, **more)
        if rest:
            near = nearest(rest[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(map(_seen, rest))}{near}")
        return found, rest


def _seen(word: str) -> str:
    """A word as it was typed, where a line shows it whole."""
    return word if word.isprintable() else repr(word)


def nearest(given: str, known: Iterable[str]) -> str:
    """ " (did you mean …?)" where one of the names is much like the given one, else ""."""
    import difflib  # here: only a mistake needs it

    near = difflib.get_close_matches(given, list(known), 1, 0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def any_encoding() -> None:
    """From here on printing never fails for a character that a terminal or a pipe has not.

    What is written so often that its code would be hard to read gets a likeness.
    """
    codecs.register_error("shardlab", _alike)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="shardlab")


def _alike(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    likeness = (_LIKENESS.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing)
    return "".join(likeness), error.end


def command(
    commands: argparse._SubParsersAction, name: str, description: str | None
) -> argparse.ArgumentParser:
    """A new command. Its words in the list of commands stand in that list."""
    parser = commands.add_parser(
        name,
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
        raise ValueError(f"{name}={told(given or '')}: allowed are {allowed}") from None


def whole(name: str, given: str | None, least: int = 1, most: int = MOST) -> int:
    """The value of an option as a whole number. Raises ValueError, which says what is allowed."""
    value: Any = given or ""
    with suppress(ValueError):  # what is no number is refused as it was given
        value = int(value)
    check_whole(least, most, **{name: value})
    return value


def apart(given: Iterable[str], names: Iterable[str], words: str) -> None:
    """Raise ValueError where one of these options is given beside what has no use for it.

    words: what that is, and what is allowed with it.
    """
    for name in names:
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} {words}")


def folder(name: str, given: str | Path) -> Path:
    """The folder that an option names, made where it is new. Raises ValueError if files cannot be.

    It is asked for last, when all other options are known to be good.
    """
    path = place(name, given)
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
    """What `write(path)` returns; ValueError where the file that an option names cannot be written.

    It is written beside its place and then put there, so that a reader finds the old file or the
    new one. Only a new name and a plain file are taken: nothing takes the place of a device. A link
    stays one, and the file that it leads to is written. write: a text may stand for it, which goes
    into the file in UTF-8. room: makes the file's folder, too.

    Without `write` it is only tried, before long work begins, and nothing is left or changed.
    """
    allowed = "allowed are files in a folder that exists and can be written"
    path = place(name, given)
    try:
        try:
            old = path.stat()
        except FileNotFoundError:
            old = None
        path = Path(os.path.realpath(path))  # nothing, where a link of /proc's leads to no name
        if old and (not path.is_file() or any(os.path.samestat(old, end) for end in _ends())):
            what = "a folder" if path.is_dir() else "no plain file, or where this prints"
            raise ValueError(f"{name}={str(given)!r}: {allowed} (this is {what})")
        if old and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
        if room:
            path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as beside:
            part = Path(beside, path.name)
            part.touch()
            if write is None:
                return None
            found = part.write_text(write, "utf-8") if isinstance(write, str) else write(part)
            if old:
                os.chmod(part, old.st_mode & 0o777)
            os.replace(part, path)
            return found
    except OSError as error:
        raise ValueError(f"{name}={str(given)!r}: {allowed} ({error.strerror})") from None


def _ends() -> Iterable[os.stat_result]:
    """What this process's output and errors go to."""
    for end in (1, 2):
        try:
            yield os.fstat(end)
        except OSError:  # closed
            continue
