"""Text to train on, without a download: the sources of Python's own standard library.

Every Python installation has them, they are real text, and for a given version of Python they are
the same bytes everywhere. One byte is one token, so the vocabulary has 256 entries. A file of your
own works too.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch.utils.data import Dataset

STDLIB = "stdlib"
VOCAB = 256


@lru_cache(maxsize=4)
def corpus(source: str | Path = STDLIB, limit: int = 4_000_000) -> torch.Tensor:
    """The first `limit` bytes of `source` as a uint8 tensor of shape [tokens].

    source: "stdlib", or a path to a text file.
    """
    return _tensor(_documents(str(source), limit))


@lru_cache(maxsize=4)
def parts(
    source: str | Path = STDLIB, limit: int = 4_000_000
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same text in three parts, to train, to validate and to test: uint8, each of [tokens].

    Every tenth file of the standard library is for validation, and every tenth for testing: windows
    cut from one file share names and phrases, and are not independent.
    A single file is cut into 80, 10 and 10 %.
    """
    documents = _documents(str(source), limit)
    if len(documents) < 10:
        whole = _tensor(documents)
        return whole.tensor_split([len(whole) * 8 // 10, len(whole) * 9 // 10])
    own = {4: 1, 9: 2}  # the last digit of a document's number -> which part gets it
    dealt: tuple[list[bytes], ...] = ([], [], [])
    for number, document in enumerate(documents):
        dealt[own.get(number % 10, 0)].append(document)
    return tuple(map(_tensor, dealt))


def _tensor(documents: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)


def _documents(name: str, limit: int) -> list[bytes]:
    """Files of `name`, `limit` bytes in all."""
    if limit < 1:
        raise ValueError(f"limit={limit}: allowed is a number of bytes above 0")
    if name == STDLIB:
        found = _stdlib()
    elif Path(name).is_file():
        found = iter([Path(name).open("rb").read(limit)])
    else:
        raise ValueError(f"source={name!r}: allowed are {STDLIB!r}, and the path of a text file")
    documents, left = [], limit
    for document in found:
        documents.append(document[:left])
        left -= len(document)
        if left <= 0:
            break
    if not any(documents):
        raise ValueError(f"source={name!r} is empty")
    return documents


def _stdlib() -> Iterator[bytes]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    # Top-level modules alone: distributions leave out test suites and packages, hardly ever these.
    for path in sorted(folder.glob("*.py")):
        if not path.name.startswith("_"):  # generated ones among them, with this machine's paths
            yield path.read_bytes()


class Windows(Dataset):
    """Windows of `seq` tokens, each with the same window one token later as its target.

    Item i is (tokens_S, targets_S), both int64 of shape [seq]. `stride` is the distance between
    the starts of two windows; by default they touch and do not overlap. source: see `corpus`, or
    a tensor of tokens, such as one of `parts`.
    """

    def __init__(
        self, seq: int, source: str | Path | torch.Tensor = STDLIB, stride: int | None = None
    ):
        self.data = source if isinstance(source, torch.Tensor) else corpus(source)
        self.seq = seq
        self.stride = seq if stride is None else stride
        if not 1 <= seq < len(self.data):
            raise ValueError(f"seq={seq}: allowed are 1 to {len(self.data) - 1} tokens")
        if self.stride < 1:
            raise ValueError(f"stride={stride}: allowed is a number of tokens above 0")

    def __len__(self) -> int:
        return (len(self.data) - 1 - self.seq) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index}: there are {len(self)}")
        start = index * self.stride
        window = self.data[start : start + self.seq + 1].long()
        return window[:-1], window[1:]


def batch(
    seq: int, size: int, start: int = 0, source: str | Path = STDLIB
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows `start` to `start + size` as (tokens_BS, targets_BS), the same at every call."""
    windows = Windows(seq, source)
    if size < 0 or start < 0 or start + size > len(windows):
        raise ValueError(
            f"start={start}, size={size}: allowed are windows 0 to {len(windows)} of {seq} tokens"
        )
    if size == 0:
        return torch.empty(0, seq, dtype=torch.long), torch.empty(0, seq, dtype=torch.long)
    pairs = [windows[i] for i in range(start, start + size)]
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
