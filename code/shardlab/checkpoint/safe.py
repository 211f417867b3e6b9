"""Folders of safetensors, as Hugging Face's hub has them: read by their headers, written in order.

    model.safetensors                       all of it; or
    model-00001-of-00002.safetensors, …     some tensors each, and
    model.safetensors.index.json            which tensor is in which file

A file is 8 bytes, the length of a header in JSON, the header (name -> dtype, shape, first byte and
end), and the numbers. So a header tells what a file holds and how long it has to be, and whoever
knows all shapes writes a file from front to back, with one tensor in memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .folder import CheckpointError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def stored(folder: Path) -> dict[str, Stored]:
    """Return every tensor in `folder`, by name, from headers and index; no number is read.

    Links are followed: all files of a snapshot in the hub's own cache are links into `blobs/`.

    Raises CheckpointError, which names the file, for one that is missing, cut off, or no
    safetensors file, and for an index that names another file than the one that has a tensor.
    """
    if not (folder / INDEX).exists():
        if not (folder / ONE).exists():
            raise CheckpointError(f"{folder}: there is neither {ONE} nor {INDEX} in it")
        return _header(folder / ONE)
    try:
        check_file(folder / INDEX)
        index = json.loads((folder / INDEX).read_bytes())["weight_map"]
        files = sorted(set(index.values()))
        if any("/" in name or name in ("", ".", "..") for name in files):
            raise ValueError("it names files of other folders")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX}: no index of safetensors: {error!r}") from None
    there = {name: _header(folder / name) for name in files}
    for name, file in index.items():
        if name not in there[file]:
            raise CheckpointError(f"{folder / file}: {name} is not in it, as {INDEX} says")
    return {name: there[file][name] for name, file in index.items()}


def check_file(path: Path) -> None:
    """Raise CheckpointError unless `path` is a file, or a link to one: a pipe may never open."""
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: is {'no file' if os.path.exists(path) else 'missing'}")


def _header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file, whose header the library checks against its length."""
    check_file(path)
    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Stored(path.name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in parts.items()
            }
    except (OSError, SafetensorError) as error:
        text = "cannot be read, cut off, or no safetensors file"
        raise CheckpointError(f"{path}: {text}: {error}") from None


def are_equal(folder: Path, there: Mapping[str, Stored], a: str, b: str) -> bool:
    """Return True if two tensors of one shape have equal numbers; a few rows at a time are read."""
    if a == b:
        return True
    with (
        safe_open(folder / there[a].file, "pt") as file_a,
        safe_open(folder / there[b].file, "pt") as file_b,
    ):
        pair = file_a.get_slice(a), file_b.get_slice(b)
        rows = (slice(first, first + 1024) for first in range(0, there[a].shape[0], 1024))
        return all((pair[0][of] == pair[1][of]).all() for of in rows)


@dataclass
class File:
    """A file that is to be written: the tensors in it, in order."""

    name: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def dealt(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], most: int
) -> list[File]:
    """Which file each tensor goes into: in order, at most `most` bytes each, or a single tensor."""
    files, room = [File("")], most
    for name, shape in shapes.items():
        size = prod(shape) * dtypes[name].itemsize
        if size > room and files[-1].shapes:
            files.append(File(""))
            room = most
        files[-1].shapes[name] = shape
        room -= size
    for number, file in enumerate(files):
        file.name = f"model-{number + 1:05}-of-{len(files):05}.safetensors" if files[1:] else ONE
    return files


def header(file: File, dtypes: Mapping[str, torch.dtype]) -> bytes:
    """What stands before the numbers, padded to a multiple of 8, as the library does."""
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in file.shapes.items():
        begin, end = end, end + prod(shape) * dtypes[name].itemsize
        word = _WORDS[dtypes[name]]
        found[name] = {"dtype": word, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def index(files: Sequence[File], dtypes: Mapping[str, torch.dtype]) -> bytes:
    """The index of several files."""
    every = {name: shape for file in files for name, shape in file.shapes.items()}
    size = sum(prod(shape) * dtypes[name].itemsize for name, shape in every.items())
    metadata = {"total_parameters": sum(map(prod, every.values())), "total_size": size}
    weight_map = {name: file.name for file in files for name in file.shapes}
    content = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"


def numbers(tensor: Tensor) -> memoryview:
    """A tensor's bytes, in its order."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
