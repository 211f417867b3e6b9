"""From a config.json to a `Structure`. torch and transformers are loaded when one is read."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from shardlab.common.files import read_text
from shardlab.layout.structure import Structure

from . import bounds


def read(path: str | Path, name: str = "config") -> Structure:
    """The structure of the model that a config.json describes.

    name: what messages call the argument. The same content is built once in a process. Raises
    ValueError, in one line, for a file that is none, and for a model that is not counted.
    """
    text = read_text(name, path, "JSON files", bounds.BYTES)
    try:
        return _read(text)
    except ValueError as error:
        raise ValueError(f"{name}={str(path)!r}: {error}") from None


def planned(path: str | Path, name: str = "config") -> Structure:
    """The same, of a model whose time and memory can be predicted, or ValueError says why not."""
    found = read(path, name)
    if found.unplanned:
        words = f"{found.model_type} is counted, and not planned: {found.unplanned}"
        raise ValueError(f"{name}={str(path)!r}: {words}")
    return found


@lru_cache(maxsize=64)
def _read(text: str, trace: bool = True) -> Structure:
    """trace: follow what layers compute and keep, which takes nine tenths of the time."""
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
        found = replace(found, assumed=(*found.assumed, words))
    return found
