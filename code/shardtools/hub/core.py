"""A model's structure from its config.json; torch and transformers are imported on use."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from shardlab.common.files import read_text
from shardlab.layout.structure import Structure

from . import bounds


def read(path: str | Path, name: str = "config") -> Structure:
    """Return the structure of the model that a config.json describes.

    name: the argument's name in messages. Equal content is built once in a process.
    Raises ValueError for a file that is no config, and for a model that is not counted.
    """
    text = read_text(name, path, "a JSON file", bounds.BYTES)
    try:
        return _read(text)
    except ValueError as error:
        raise ValueError(f"{name}={str(path)!r}: {error}") from None


def planned(path: str | Path, name: str = "config") -> Structure:
    """Read a structure, but raise ValueError for a model that cannot be predicted."""
    found = read(path, name)
    if found.unsupported_reason:
        words = f"{found.model_type} is counted, and not planned: {found.unsupported_reason}"
        raise ValueError(f"{name}={str(path)!r}: {words}")
    return found


@lru_cache(maxsize=64)
def _read(text: str, trace: bool = True) -> Structure:
    """Build the structure; trace: follow layers' computation (most of the time)."""
    given, how = bounds.read(text)
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # in a notebook tqdm warns of lacking widgets
            from .facts import structure
    except ImportError as error:
        raise ValueError(f"transformers is needed to build its class ({error})") from None
    found = structure(given, trace)
    if how:
        words = f"{how} is not read: weights are counted unquantised, as a training has them"
        found = replace(found, assumptions=(*found.assumptions, words))
    return found
