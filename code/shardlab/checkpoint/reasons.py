"""Why a file could not be written: what the operating system has said, from under torch's words."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any


def said(error: BaseException) -> BaseException:
    """The operating system's own error, where there is one behind `error`; otherwise `error`.

    torch writes through C++, which turns a full disk into an "unexpected pos 704 vs 598".
    """
    found: BaseException | None = error
    while found and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def telling(storage: Any) -> Any:
    """DCP's writer `storage`, which now raises what was said: what is behind does not travel."""
    write = storage.write_data

    def write_data(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except Exception as error:
            raise said(error) from None

    storage.write_data = write_data
    return storage


def _failures(error: BaseException) -> list[tuple[int, BaseException]]:
    """What failed on which ranks, for an error of DCP's; the operating system's word first."""
    found = [(rank, inner) for rank, (inner, _) in getattr(error, "failures", {}).items()]
    return sorted(found, key=lambda of: (not isinstance(of[1], OSError), of[0]))


def cause(error: BaseException) -> str:
    """The reason that DCP found, without the traceback that it puts around it."""
    for rank, inner in _failures(error):
        return f"rank {rank}: {type(inner).__name__}: {inner}"
    return f"{type(error).__name__}: {error}"


def is_full(error: BaseException) -> bool:
    """Whether the reason, on one of the ranks, is a disk without room, or a quota."""
    codes = [getattr(inner, "errno", None) for _, inner in [(0, error), *_failures(error)]]
    return errno.ENOSPC in codes or errno.EDQUOT in codes


def no_room(folder: Path, needed: int) -> str:
    """What to add then: the bytes that are needed, and those that are free in `folder` now."""
    free = shutil.disk_usage(folder).free
    return f": the disk is full: {needed:,} bytes and more are to be written, {free:,} are free"
