"""The plain program's tensors: kept in memory, or written to a folder and memory-mapped.

A folder holds `values`, one tensor behind the other, and `index.pt` with their offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .hooks import Key, Part, Sink

ALIGNMENT_BYTES = 64  # bytes: where each tensor begins in the file
INDEX_FILE, VALUES_FILE = "index.pt", "values"


def create_folder(folder: Path) -> Path:
    """Make a folder for one comparison. Raises ValueError for one that holds files."""
    folder.mkdir(parents=True, exist_ok=True)
    if names := sorted(path.name for path in folder.iterdir()):
        raise ValueError(f"folder={str(folder)!r}: must be new or empty, but it holds {names[0]!r}")
    return folder.resolve()


class Record(Sink):
    """A sink that keeps all tensors by key, in the order of the modules' last calls."""

    def __init__(self, folder: Path | None = None):
        super().__init__()
        self.parts: dict[Key, list[Part]] = {}
        self.aliases: dict[str, str] = {}  # tied parameters: another name -> first name
        self.noise: dict[Key, tuple[float, float, float]] = {}  # see `noise`
        self.sizes: dict[Key, float] = {}  # cache of root mean squares
        self.folder = folder
        self.bytes_written = 0  # written so far
        self.offsets: dict[tuple[Key, int], int] = {}  # offset of each call's tensor in the file
        self._full_tensors: dict[Key, Tensor | None] = {}

    def receive_part(self, key: Key, part: Part) -> None:
        """Keep or write the part; ignore a gradient that no optimizer reads."""
        if part.outside_optimizer:
            return
        if self.folder is None:
            kept = replace(part, value=part.value.clone(), local_samples=None)
        else:
            kept = replace(part, value=part.value.to("meta"), local_samples=None)
            self._write_part(key, part)
        self.parts[key] = [*self.parts.pop(key, ()), kept]

    def add_alias(self, name: str, first: str) -> None:
        """Store a second name of a tied parameter."""
        self.aliases[name] = first

    def _write_part(self, key: Key, part: Part) -> None:
        raw = part.value.contiguous().flatten().view(torch.uint8)
        padding = -self.bytes_written % ALIGNMENT_BYTES
        with open(self.folder / VALUES_FILE, "ab") as file:
            file.write(bytes(padding))
            file.write(memoryview(raw.numpy()))
        self.offsets[key, part.call] = self.bytes_written + padding
        self.bytes_written += padding + raw.numel()

    def save(self) -> None:
        """Write the index; does nothing without a folder."""
        if self.folder is not None:
            torch.save(self, self.folder / INDEX_FILE)

    @staticmethod
    def load(folder: Path) -> Record:
        """Load a record from a folder; its values are read on access."""
        return torch.load(folder / INDEX_FILE, weights_only=False)

    def map_values(self) -> None:
        """Map the values from the file."""
        if self.folder is None or not self.bytes_written:
            return
        file = str(self.folder / VALUES_FILE)
        raw = torch.from_file(file, shared=False, size=self.bytes_written, dtype=torch.uint8)
        for key, parts in self.parts.items():
            for part in parts:
                begin, value = self.offsets[key, part.call], part.value
                end = begin + value.numel() * value.element_size()
                part.value = raw[begin:end].view(value.dtype).view(value.shape)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without values that are in a file."""
        state = vars(self) | {"_full_tensors": {}}
        if self.folder is not None:
            state["parts"] = {
                key: [replace(part, value=part.value.to("meta")) for part in parts]
                for key, parts in self.parts.items()
            }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.map_values()

    def resolve_alias(self, key: Key) -> Key:
        """Return the key with the first name of a tied parameter."""
        return key._replace(name=self.aliases.get(key.name, key.name))

    def parts_in_order(self, key: Key) -> list[Part]:
        """Return the parts of all calls, in order."""
        return sorted(self.parts.get(key, ()), key=lambda part: part.call)

    def full_tensor(self, key: Key) -> Tensor | None:
        """Return all calls' tensors, concatenated; None if their shapes do not match."""
        if key not in self._full_tensors:
            values = [part.value for part in self.parts_in_order(key)]
            fit = all(v.dim() and v.shape[1:] == values[0].shape[1:] for v in values)
            joined = torch.cat(values) if len(values) > 1 and fit else None
            if len(self._full_tensors) > 3:
                self._full_tensors.clear()
            self._full_tensors[key] = values[0] if len(values) == 1 else joined
        return self._full_tensors[key]

    def yield_calls(self, key: Key) -> Iterator[tuple[torch.Size, int]]:
        """Yield each call's shape, and the count of numbers before it in the whole."""
        begin = 0
        for part in self.parts_in_order(key):
            yield part.value.shape, begin
            begin += part.value.numel()

    def is_scalar(self, key: Key) -> bool:
        """Return True if each call gave one number: a rank's loss is the mean of its own share."""
        return all(part.value.numel() == 1 for part in self.parts[key])
