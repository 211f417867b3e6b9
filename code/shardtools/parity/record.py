"""What the plain program computed: kept in memory, or written to a folder as it comes and mapped.

A folder holds `values`, one tensor behind the other, and `index.pt`, which says what stands where.
It is complete after each step. A folder belongs to one comparison at a time: see `claim`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.common import folder_lock

from .recording import Key, Part, Sink

ALIGNED = 64  # bytes: where each tensor begins in the file
INDEX, VALUES = "index.pt", "values"
OWN = ".parity"  # lists the files that a comparison wrote
NEW = ".new"  # ends the name of an unfinished one


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold a folder for one comparison, without the files of an earlier one.

    Raises ValueError for a folder that holds any other file, before anything is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / OWN
    names = listed.read_text("utf-8", "replace").split("\n") if listed.is_file() else []
    ours = {*names, *(name + NEW for name in names)}
    kept = {OWN, folder_lock.NAME} if names else set()
    files = {path.name: path for path in folder.iterdir()}
    if foreign := sorted(files.keys() - ours - kept):
        raise ValueError(
            f"folder={str(folder)!r}: no comparison wrote {foreign[0]!r} in it; allowed is a new "
            "folder, an empty one, or one of an earlier comparison"
        )
    listed.touch()
    with folder_lock.hold(folder, "a comparison"):
        for name in files.keys() & ours - kept:
            files[name].unlink()
        listed.write_text("")
        yield


def own(path: Path) -> Path:
    """Note a file as a comparison's own; return its path."""
    with open(path.parent / OWN, "a", encoding="utf-8") as file:
        file.write(f"{path.name}\n")
    return path


def save(value: Any, path: Path) -> None:
    """Write a comparison's file: as a whole, or not at all."""
    beside = path.with_name(path.name + NEW)
    torch.save(value, beside)
    os.replace(beside, path)


class Record(Sink):
    """A sink that keeps all; by key, in the order of the modules' last calls."""

    def __init__(self, folder: Path | None = None):
        self.parts: dict[Key, list[Part]] = {}
        self.aliases: dict[str, str] = {}  # of tied parameters: another name -> the first
        self.noise: dict[Key, tuple[float, float]] = {}  # see `noise`
        self.steps, self.watched, self.optimized = 0, False, False
        self.fewer = ""  # of how many layers: see `first_layers`
        self.folder, self.places, self.size = folder, {}, 0
        self.sizes: dict[Key, float] = {}  # root mean squares of those that were asked for
        self._wholes: dict[Key, Tensor | None] = {}
        if folder is not None:
            own(folder / VALUES).write_bytes(b"")
            own(folder / INDEX)

    def see(self, key: Key, part: Part) -> None:
        """Keep it, or write it; nothing of a gradient that no optimizer reads."""
        if part.unread:
            return
        if self.folder is None:
            kept = replace(part, value=part.value.clone(), local=None)
        else:
            kept = replace(part, value=part.value.to("meta"), local=None)
            self._write(key, part)
        self.parts[key] = [*self.parts.pop(key, ()), kept]

    def tied(self, name: str, first: str) -> None:
        """As `Sink` says."""
        self.aliases[name] = first

    def stepped(self, steps: int) -> None:
        """As `Sink` says."""
        self.steps = steps
        self.save()

    def _write(self, key: Key, part: Part) -> None:
        raw = part.value.contiguous().flatten().view(torch.uint8)
        with open(self.folder / VALUES, "ab") as file:
            file.write(bytes(-self.size % ALIGNED))
            self.size += -self.size % ALIGNED
            self.places[key, part.call] = self.size
            file.write(memoryview(raw.numpy()))
            self.size += raw.numel()

    def save(self) -> None:
        """Write the index; nothing without a folder."""
        if self.folder is not None:
            save(self, self.folder / INDEX)

    @staticmethod
    def load(folder: Path) -> Record:
        """What stands in a folder; its values are read where they are looked at."""
        record: Record = torch.load(folder / INDEX, weights_only=False)
        record.folder = folder
        record.map()
        return record

    def map(self) -> None:
        """Take the values from the file."""
        if self.folder is None or not self.size:
            return
        file = str(self.folder / VALUES)
        raw = torch.from_file(file, shared=False, size=self.size, dtype=torch.uint8)
        for key, parts in self.parts.items():
            for part in parts:
                begin, value = self.places[key, part.call], part.value
                end = begin + value.numel() * value.element_size()
                part.value = raw[begin:end].view(value.dtype).view(value.shape)

    def __getstate__(self) -> dict[str, Any]:
        """Without values that stand in a file."""
        state = vars(self) | {"_wholes": {}}
        if self.folder is not None:
            meta = {
                key: [replace(part, value=part.value.to("meta")) for part in parts]
                for key, parts in self.parts.items()
            }
            state["parts"] = meta
        return state

    def name(self, key: Key) -> Key:
        """The key by the plain model's own name of a tied parameter."""
        return key._replace(name=self.aliases.get(key.name, key.name))

    def ordered(self, key: Key) -> list[Part]:
        """What each call left."""
        return sorted(self.parts.get(key, ()), key=lambda part: part.call)

    def whole(self, key: Key) -> Tensor | None:
        """All calls' tensors, one behind the other; None where they do not fit together."""
        if key not in self._wholes:
            values = [part.value for part in self.ordered(key)]
            fit = all(v.dim() and v.shape[1:] == values[0].shape[1:] for v in values)
            joined = torch.cat(values) if len(values) > 1 and fit else None
            if len(self._wholes) > 3:
                self._wholes.clear()
            self._wholes[key] = values[0] if len(values) == 1 else joined
        return self._wholes[key]

    def calls(self, key: Key) -> Iterator[tuple[torch.Size, int]]:
        """Of each call the shape, and how many numbers stand before it in the whole."""
        begin = 0
        for part in self.ordered(key):
            yield part.value.shape, begin
            begin += part.value.numel()

    def dtype(self, key: Key) -> torch.dtype:
        """Of the first call."""
        return self.parts[key][0].value.dtype

    def scalar(self, key: Key) -> bool:
        """Whether each call gave one number: a rank's loss is the mean of its own share."""
        return all(part.value.numel() == 1 for part in self.parts[key])
