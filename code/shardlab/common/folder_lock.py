"""One writer to a folder: a lock of the operating system, which goes with its process.

The lock is `flock`'s, on the file `.lock` in the folder, which also says who holds it and stays
there. A process that dies, however it dies, lets go: nothing has to be cleared away. The standard
library alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
import weakref
from pathlib import Path
from typing import Self

NAME = ".lock"
# What a file system without locks says when it is asked for one.
_NO_LOCKS = errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK


class Held:
    """A folder that is held until `release`, or until this process ends."""

    def __init__(self, handle: int, owner: str):
        self._handle: int | None = handle
        self.owner = owner  # what the file says
        _ALL.add(self)

    def release(self) -> None:
        """Let go. Calling it again does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


_ALL: weakref.WeakSet[Held] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """In a forked child, a loader's worker for instance: no lock is to outlive its process."""
    for held in list(_ALL):
        held.release()  # closes the child's handle alone, and the parent's lock stays


os.register_at_fork(after_in_child=_leave_to_the_parent)


def hold(folder: Path, what: str) -> Held:
    """Hold `folder`, which exists, for `what` ("a training job"): keep what is returned.

    Raises ValueError, which names folder, host and process, where somebody holds it already, in
    this process or in another one; OSError where the folder takes no file. A file system without
    locks gets a warning, and no lock: to write is more than to be watched.
    """
    path = folder / NAME
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    owner = f"{what}, process {os.getpid()} on {socket.gethostname()}"
    try:
        _lock(handle, folder)
        os.ftruncate(handle, 0)
        os.pwrite(handle, owner.encode(), 0)
        os.fsync(handle)  # for those that read it on other hosts
    except BlockingIOError:
        found = os.pread(handle, 1000, 0).decode(errors="replace") or "another process"
        os.close(handle)
        allowed = "allowed is a folder of its own, or to wait for its end"
        raise ValueError(f"folder={str(folder)!r}: {found} writes into it; {allowed}") from None
    except OSError:
        os.close(handle)
        raise
    return Held(handle, owner)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        text = "this file system has no locks: let nobody else write into it meanwhile"
        warnings.warn(f"{folder}: {text}", stacklevel=3)
