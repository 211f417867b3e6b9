"""Options of the commands. A bad value gets one line: its name, the value, and what it must be.

argparse's own messages name types, not allowed values. So text that is no number stays text, and
the dataclass or function that uses the value refuses it, as in Python. `make_folder` and
`write_file` check folders and files that options name; `shardlab.common.files` reads them.

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

MAX_DEFAULT_SEQ = 8192  # tokens of a sequence without --seq, if the model takes more


def format_seq(seq: int, longest: int) -> str:
    """Return "8,192 tokens (of at most 40,960)", or "8,192 tokens" if the model takes no more."""
    return f"{seq:,} tokens" + f" (of at most {longest:,})" * (seq < longest)


class Parser(argparse.ArgumentParser):
    """A parser that reports an unknown option in one line, with the nearest known option."""

    def error(self, message: str) -> Any:
        """End the process with status 2, without argparse's usage text."""
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse as argparse does, but refuse unknown options."""
        found, rest = super().parse_known_args(*args, **kwargs)
        if rest:
            suggestion = suggest_nearest(rest[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(rest)}{suggestion}")
        return found, rest


def suggest_nearest(given: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" if one of the names is similar to the given one, else ""."""
    import difflib  # imported here: only a mistake needs it

    matches = difflib.get_close_matches(given, list(known), 1, 0.7)
    return f" (did you mean {matches[0]}?)" if matches else ""


def escape_unencodable() -> None:
    """Escape characters that a terminal or a pipe cannot encode, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def add_parser(
    commands: argparse._SubParsersAction, name: str, description: str | None
) -> argparse.ArgumentParser:
    """Add a subcommand. `description` is its manual page, printed by --help."""
    parser = commands.add_parser(
        name,
        help=(description or "").strip().partition("\n")[0],
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # "-1.5" is a bad value, not an unknown option: the message must name the option before it.
    parser._negative_number_matcher = re.compile(r"-[.\d]")  # type: ignore[attr-defined]
    return parser


def add_option(
    parser: Any, name: str, help: str, metavar: str, kind: Callable[[str], Any] = str
) -> None:
    """Add an option with a value, converted to `kind` if possible. A missing value is ""."""
    convert = partial(_convert_or_keep, kind)
    parser.add_argument(f"--{name}", nargs="?", const="", help=help, metavar=metavar, type=convert)


def add_flag(parser: Any, name: str, help: str) -> None:
    """Add an option without a value: None unless it is given."""
    parser.add_argument(f"--{name}", action="store_true", default=None, help=help)


def _convert_or_keep(kind: Callable[[str], Any], text: str) -> Any:
    with suppress(ValueError):  # text that cannot be converted is refused later
        return kind(text)
    return text


def collect_options(args: argparse.Namespace, dataclass: Any = None) -> dict[str, Any]:
    """Return the options that were given, by name; only the fields of `dataclass`, if any."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    names = given if dataclass is None else dataclass.__dataclass_fields__
    return {name: given[name] for name in names if name in given}


def parse_whole(name: str, value: str | None, minimum: int = 1, maximum: int = MAX_QUANTITY) -> int:
    """Return an option's value as a whole number. Raises ValueError if it is out of range."""
    value = _convert_or_keep(int, value or "")
    check_integer(minimum, maximum, **{name: value})
    return value


def refuse_options(options: Iterable[str], names: Iterable[str], reason: str) -> None:
    """Raise ValueError if an option of `names` is given. reason: the option that excludes it."""
    for name in names:
        if name in options:
            raise ValueError(f"--{name.replace('_', '-')} {reason}")


def check_exactly_one(options: Iterable[str], *names: str) -> None:
    """Raise ValueError unless exactly one of these options is given."""
    words, given = " and ".join(f"--{n}" for n in names), [f"--{n}" for n in names if n in options]
    if len(given) != 1:
        raise ValueError(f"{' and '.join(given) or 'neither'}: must be exactly one of {words}")


def make_folder(name: str, value: str | Path) -> Path:
    """Return the folder of an option, made if it is new. Raises ValueError if it is not writable.

    Call it last, when all other options are known to be good.
    """
    path = parse_path(name, value)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        words = f"must be a folder that can be written or made ({error.strerror})"
        raise ValueError(f"{name}={str(value)!r}: {words}") from None
    return path


def write_file(
    name: str,
    value: str | Path,
    content: Callable[[Path], Any] | str | None = None,
    make_parent: bool = False,
) -> Any:
    """Write a file atomically. Raises ValueError for a file that cannot be written.

    The file is written into a folder beside it and then moved, so that a reader finds the old or
    the new file. A symbolic link stays, and its target is written.
    content: a text, or a function of the path, whose result is returned; None: only check that the
    file can be written, before long work begins. make_parent: make the file's folder, too.
    """
    path = Path(os.path.realpath(parse_path(name, value)))
    try:
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise PermissionError(13, "a folder, no plain file, or read-only")
        if make_parent:
            path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as folder:
            part = Path(folder, path.name)
            part.touch()
            if content is None:
                return None
            write = content if callable(content) else lambda path: path.write_text(content, "utf-8")
            result = write(part)
            os.replace(part, path)
            return result
    except OSError as error:
        words = f"must be a file that can be written, in a folder that exists ({error.strerror})"
        raise ValueError(f"{name}={str(value)!r}: {words}") from None
