"""Files that a user names: their paths and texts, read with one clear error for a bad one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LARGEST = 64 * 10**6  # bytes of a file that is read whole


def place(name: str, given: str | Path) -> Path:
    """The path that an option names, with its ~ replaced. Raises ValueError for what names none."""
    text = os.fspath(given)
    if not text or not text.isprintable():
        raise ValueError(f"{name}={text!r}: allowed are names, without control characters")
    return Path(text).expanduser()


def read_text(name: str, given: str | Path, kind: str, most: int = LARGEST) -> str:
    """What the file that an option names holds; kind: of files that are allowed, as "CSV files".

    Raises ValueError for a file that cannot be read, is not in UTF-8, or has more than `most`
    bytes: a device may never end.
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
    """What the JSON file that an option names holds. Raises ValueError as `read_text` does."""
    text = read_text(name, given, "JSON files")
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        why = str(error)
    raise ValueError(f"{name}={str(given)!r}: allowed are JSON files in UTF-8 ({why})")
