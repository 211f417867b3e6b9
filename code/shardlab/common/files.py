"""Read files that a user names in an option, with one clear error for a bad path or file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LARGEST = 64 * 10**6  # largest size of a file that is read into memory, in bytes


def place(name: str, given: str | Path) -> Path:
    """Return the path that the option `name` gives, with ~ expanded; ValueError if it is bad."""
    text = os.fspath(given)
    if not text or not text.isprintable():
        raise ValueError(f"{name}={text!r}: allowed are names, without control characters")
    return Path(text).expanduser()


def read_text(name: str, given: str | Path, kind: str, most: int = LARGEST) -> str:
    """Return the text of the file that the option `name` gives.

    kind: for messages, such as "CSV files". Raises ValueError for a file that cannot be read, is
    not in UTF-8, or has more than `most` bytes (a device such as /dev/zero never ends).
    """
    try:
        with open(place(name, given), "rb") as file:
            text = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{name}={str(given)!r}: allowed are files ({error.strerror})") from None
    if len(text) > most:
        allowed = f"allowed are files of {most} bytes at most"
        raise ValueError(f"{name}={str(given)!r}: {allowed}")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name}={str(given)!r}: allowed are {kind} in UTF-8") from None


def read_json(name: str, given: str | Path) -> Any:
    """Parse the JSON file that the option `name` gives; raises ValueError as `read_text`."""
    text = read_text(name, given, "JSON files")
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        why = str(error)
    raise ValueError(f"{name}={str(given)!r}: allowed are JSON files in UTF-8 ({why})")
