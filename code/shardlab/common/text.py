"""Training text without a download: the source code of Python's standard library.

Every Python installation has it, it is real text, and it has the same bytes everywhere for a given
version of Python. One byte is one token, so the vocabulary has 256 entries. Any other text file
works, too.
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch.utils.data import Dataset

STDLIB = "stdlib"
MAX_CORPUS_BYTES = 4_000_000  # longer texts are truncated


@lru_cache(maxsize=4)
def load_corpus(source: str | Path = STDLIB) -> torch.Tensor:
    """Return the text of `source`, "stdlib" or a path to a file, as a uint8 tensor [tokens]."""
    if source == STDLIB:
        return _to_tensor(_read_stdlib())
    try:
        data = Path(source).read_bytes()[:MAX_CORPUS_BYTES]
    except OSError as error:
        allowed = f"{STDLIB!r} or the path of a readable text file ({error.strerror})"
        raise ValueError(f"source={source!r}: must be {allowed}") from None
    if not data:
        raise ValueError(f"source={source!r}: must be a file with text, and is empty")
    return _to_tensor([data])


@lru_cache(maxsize=1)
def load_splits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the standard library into training, validation and test text, each uint8 [tokens].

    One file of ten is for validation, and another one for testing. The split is by file because
    windows of the same file share names and phrases, and are not independent.
    """
    held_out = {4: 1, 9: 2}  # last digit of a document's number -> index of its split; else 0
    splits: tuple[list[bytes], ...] = ([], [], [])
    for number, document in enumerate(_read_stdlib()):
        splits[held_out.get(number % 10, 0)].append(document)
    return tuple(map(_to_tensor, splits))


def _to_tensor(documents: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)


def _read_stdlib() -> list[bytes]:
    """Return files of the standard library, LIMIT bytes in all."""
    folder, left, documents = Path(sysconfig.get_paths()["stdlib"]), MAX_CORPUS_BYTES, []
    # Only top-level modules: distributions often omit test suites and packages.
    for path in sorted(folder.glob("[!_]*.py")):  # names with _ include machine-specific files
        if left > 0:
            documents.append(path.read_bytes()[:left])
            left -= len(documents[-1])
    return documents


class TokenWindows(Dataset):
    """A dataset of windows of `seq` tokens, with the window one token later as target.

    Item i is (tokens_S, targets_S), both int64 of shape [seq]; windows are adjacent and do not
    overlap. source: as in `load_corpus`, or a tensor of tokens, such as one of `load_splits`.
    """

    def __init__(self, seq: int, source: str | Path | torch.Tensor = STDLIB):
        self.data = source if isinstance(source, torch.Tensor) else load_corpus(source)
        self.seq = seq
        if not 1 <= seq < len(self.data):
            raise ValueError(f"seq={seq}: must be from 1 to {len(self.data) - 1} tokens")

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.seq

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index}: must be from 0 to {len(self) - 1}")
        window = self.data[index * self.seq : (index + 1) * self.seq + 1].long()
        return window[:-1], window[1:]


def get_batch(seq: int, size: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows `start` to `start + size` as (tokens_BS, targets_BS), equal at every call."""
    windows = TokenWindows(seq)
    if size < 0 or start < 0 or start + size > len(windows):
        allowed = f"windows 0 to {len(windows)} of {seq} tokens"
        raise ValueError(f"start={start}, size={size}: must lie within {allowed}")
    first, last = start * seq, (start + size) * seq
    tokens, targets = (windows.data[first + i : last + i].long() for i in (0, 1))
    return tokens.view(size, seq), targets.view(size, seq)
