"""An exclusive lock on a folder, for one writer at a time, released when its process ends.

The operating system locks the file `.lock` in the folder, and the file stays. The lock is released
even if the process is killed, so nothing needs cleaning up. Forked children do not hold the lock.
"""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

LOCK_FILE = ".lock"


def lock_folder(folder: Path, owner: str) -> FileLock:
    """Lock the existing `folder` until `release` of the result. owner: for the message ("a job").

    Raises ValueError, which names the folder, if this or another process holds the lock already;
    OSError if no file can be created in the folder.
    """
    lock = FileLock(folder / LOCK_FILE, thread_local=False)  # another thread may release it
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"folder={str(folder)!r}: must not be in use, and another process writes into it; wait"
            f" for that process, or give {owner} another folder"
        ) from None
    return lock
