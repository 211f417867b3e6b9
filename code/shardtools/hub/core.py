"""A model's structure from its config.json; torch and transformers are imported on use."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from shardlab.common.files import read_text
from shardlab.layout.structure import Structure

from . import limits


def read_structure(path: str | Path, name: str = "config") -> Structure:
    """Return the structure of the model that a config.json describes.

    name: the argument's name in messages. Equal content is built once in a process.
    Raises ValueError for a file that is no config, and for a model that cannot be counted.
    """
    text = read_text(name, path, "a JSON file", limits.MAX_FILE_BYTES)
    try:
        return _parse_structure(text)
    except ValueError as error:
        raise ValueError(f"{name}={str(path)!r}: {error}") from None


def read_plannable(path: str | Path, name: str = "config") -> Structure:
    """Read a structure, but raise ValueError for a model that cannot be predicted."""
    found = read_structure(path, name)
    if found.unsupported_reason:
        words = f"{found.model_type} can be counted, but not planned: {found.unsupported_reason}"
        raise ValueError(f"{name}={str(path)!r}: {words}")
    return found


@lru_cache(maxsize=64)
def _parse_structure(text: str, trace: bool = True) -> Structure:
    """Build the structure. trace: also trace the layers, which takes most of the time."""
    given, quantization = limits.parse_config(text)
    try:
        with warnings.catch_warnings(action="ignore"):  # tqdm warns of missing widgets
            from .structure import build_structure
    except ImportError as error:
        raise ValueError(f"needs transformers to build its class ({error})") from None
    found = build_structure(given, trace)
    if quantization:
        words = f"{quantization} is not read: weights are counted unquantised, as in training"
        found = replace(found, assumptions=(*found.assumptions, words))
    return found
