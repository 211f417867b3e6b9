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
from torch import Tensor

from .folder import CheckpointError, open_plain

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_MOST = 100 * 2**20  # bytes of a header, as the library has it


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def stored(folder: Path) -> dict[str, Stored]:
    """Every tensor in `folder`, by name, from headers and index; no number is read.

    Raises CheckpointError, which names the file, for one that is missing, cut off, or no
    safetensors file, and for an index that names another file than the one that has a tensor.
    """
    if not (folder / INDEX).exists():
        if not (folder / ONE).exists():
            raise CheckpointError(f"{folder}: there is neither {ONE} nor {INDEX} in it")
        return _header(folder / ONE)
    try:
        with open_plain(folder / INDEX) as file:
            index = json.loads(file.read())["weight_map"]
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


def _header(path: Path) -> dict[str, Stored]:
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MOST, size - 8):
                raise ValueError(f"it has {size:,} bytes, of which the header takes {length:,}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found, end = {}, 0
        for name, of in header.items():
            found[name] = Stored(path.name, str(of["dtype"]), tuple(of["shape"]))
            end = max(end, of["data_offsets"][1])
        if size != 8 + length + end:
            raise ValueError(f"it has {size:,} bytes instead of {8 + length + end:,}")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, RecursionError) as error:
        raise CheckpointError(f"{path}: cut off, or no safetensors file: {error}") from None
    return found


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
