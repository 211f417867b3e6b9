"""Files that a user names: their paths and texts, read with one clear error for a bad one."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from .arguments import MOST

LARGEST = 64 * 10**6  # bytes of a file that is read whole
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # ends a line, or is not seen in one


def place(name: str, given: str | Path) -> Path:
    """The path that an option names, with its ~ replaced. Raises ValueError for what names none."""
    text = os.fspath(given)
    if not text or _CONTROL.search(text):
        raise ValueError(f"{name}={text!r}: allowed are names, without control characters")
    try:
        path = Path(text).expanduser()
        path.exists()
    except RuntimeError:
        allowed = "allowed after ~ is a user of this machine; a name that begins with it is ./~…"
        raise ValueError(f"{name}={text!r}: {allowed}") from None
    except OSError as error:  # too long; Python 3.12 and later say that it is not there
        allowed = "allowed are names of files and folders"
        raise ValueError(f"{name}={text!r}: {allowed} ({error.strerror})") from None
    return path


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
    """What the JSON file that an option names holds.

    Raises ValueError as `read_text` does, for what is no JSON or nests too deep, and for a number
    of more digits than `arguments.MOST`, or that is none.
    """
    text = read_text(name, given, "JSON files")
    try:
        return json.loads(text, parse_int=_whole, parse_float=_real, parse_constant=_real)
    except RecursionError:
        why = "it nests too deep"
    except ValueError as error:
        why = str(error)
    raise ValueError(f"{name}={str(given)!r}: allowed are JSON files in UTF-8 ({why})")


def _whole(text: str) -> int:
    if len(text) > len(str(MOST)):
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:30]}")
    return value
