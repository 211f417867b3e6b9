"""Text to train on, without a download: the sources of Python's own standard library.

Every Python installation has them, they are real text, and for a given version of Python they are
the same bytes everywhere. One byte is one token, so the vocabulary has 256 entries. A file of your
own or a data set of the Hugging Face hub by name works too; the first use of a data set leaves a
copy of its text in COPIES, so that a node without a network, or without `datasets`, has it too.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch.utils.data import Dataset

STDLIB = "stdlib"
VOCAB = 256
COPIES = Path("~/.cache/shardlab/text")  # of data sets: in a home that all nodes share


@lru_cache(maxsize=4)
def corpus(source: str | Path = STDLIB, limit: int = 4_000_000) -> torch.Tensor:
    """The first `limit` bytes of `source` as a uint8 tensor of shape [tokens].

    source: "stdlib"; a path to a text file; or "hf:NAME" for a Hugging Face data set with a column
    `text`: the first use of so many bytes needs the package `datasets` and a network, later ones
    read the copy that it left. On a cluster, call it once on the login node.
    """
    return _tensor(_documents(str(source), limit))


@lru_cache(maxsize=4)
def parts(
    source: str | Path = STDLIB, limit: int = 4_000_000
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same text in three parts, to train, to validate and to test: uint8, each of [tokens].

    Every tenth file of the standard library (or row of a data set) is for validation, and every
    tenth for testing: windows cut from one file share names and phrases, and are not independent.
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
    """Files or rows of `name`, `limit` bytes in all."""
    if limit < 1:
        raise ValueError(f"limit={limit}: allowed is a number of bytes above 0")
    if name == STDLIB:
        found = _stdlib()
    elif name.startswith("hf:"):
        found = _hugging_face(name[3:], limit)
    elif Path(name).is_file():
        found = iter([Path(name).open("rb").read(limit)])
    else:
        raise ValueError(
            f"source={name!r}: allowed are {STDLIB!r}, the path of a text file, and 'hf:NAME'"
        )
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


def _hugging_face(name: str, limit: int) -> Iterator[bytes]:
    """Rows of a data set, from their copy where it has `limit` bytes, else from the hub."""
    copy = COPIES.expanduser() / f"{quote(name, safe='')}.jsonl"
    if not _enough(copy, limit):
        _fetch(name, limit, copy)
    with copy.open(encoding="utf-8") as lines:
        next(lines)  # how much there is
        for line in lines:
            yield json.loads(line).encode() + b"\n"


def _enough(copy: Path, limit: int) -> bool:
    """Whether a copy has the first `limit` bytes, or all that there is."""
    if not copy.exists():
        return False
    with copy.open(encoding="utf-8") as lines:
        there = json.loads(next(lines))
    return there["whole"] or there["bytes"] >= limit


def _fetch(name: str, limit: int, copy: Path) -> None:
    """Leave a copy of the first `limit` bytes. Raises ValueError where they cannot be had."""
    call = f"text.corpus({f'hf:{name}'!r}, limit={limit})"
    needs = (
        "needs a network and the package `datasets` (pip install datasets), once: where both are"
    )
    needs = f"{needs}, {call} leaves a copy in {copy.parent}"
    rows: list[str] = []
    size = 0
    try:
        from datasets import load_dataset

        for row in load_dataset(name, split="train", streaming=True):
            rows.append(_text(name, row))
            size += len(rows[-1].encode()) + 1
            if size >= limit:
                break
    except ValueError as error:
        if str(error).startswith("source="):
            raise
        raise ValueError(f"source='hf:{name}' {needs} ({_line(error)})") from None
    except Exception as error:  # of a dozen kinds: no package, no network, no such data set
        raise ValueError(f"source='hf:{name}' {needs} ({_line(error)})") from None
    copy.parent.mkdir(parents=True, exist_ok=True)
    beside = copy.with_name(f"{copy.name}.{os.getpid()}")  # ranks may fetch at once
    head = {"bytes": size, "whole": size < limit}
    beside.write_text("".join(json.dumps(one) + "\n" for one in (head, *rows)), encoding="utf-8")
    beside.replace(copy)


def _text(name: str, row: dict[str, Any]) -> str:
    if "text" not in row:
        raise ValueError(f"source='hf:{name}' has columns {', '.join(row)}: allowed is one, `text`")
    return str(row["text"])


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


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
