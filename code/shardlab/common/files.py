"""Read files that a user names in an option, with one clear error for a bad path or file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 64 * 10**6  # larger files are refused, because they are read into memory


def parse_path(option: str, path: str | Path) -> Path:
    """Return the path given by a command-line option, with ~ expanded; ValueError if invalid."""
    text = os.fspath(path)
    if not text or not text.isprintable():
        raise ValueError(f"{option}={text!r}: must be a file name without control characters")
    return Path(text).expanduser()


def read_text(option: str, path: str | Path, kind: str, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of the file given by a command-line option.

    kind: for messages, such as "a CSV file". Raises ValueError for a file that cannot be read, is
    not in UTF-8, or has more than `max_bytes` bytes (a device such as /dev/zero never ends).
    """
    refused = f"{option}={str(path)!r}: must be"
    try:
        with open(parse_path(option, path), "rb") as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{refused} a readable file ({error.strerror})") from None
    if len(text) > max_bytes:
        raise ValueError(f"{refused} a file of at most {max_bytes} bytes")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{refused} {kind} in UTF-8") from None


def read_json(option: str, path: str | Path) -> Any:
    """Parse the JSON file given by a command-line option; raises ValueError as `read_text`."""
    text = read_text(option, path, "a JSON file")
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        reason = str(error)
    raise ValueError(f"{option}={str(path)!r}: must be a JSON file in UTF-8 ({reason})")
