"""One writer to a folder: a lock of the operating system, which goes with its process.

The lock lies on the file `.lock` in the folder, which stays there. A process that dies, however it
dies, lets go: nothing has to be cleared away. A child that it forked holds nothing.
"""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

NAME = ".lock"


def hold(folder: Path, what: str) -> FileLock:
    """Hold `folder`, which exists, for `what` ("a training job"), until the result's `release`.

    Raises ValueError, which names the folder, where somebody holds it already, in this process or
    in another one; OSError where the folder takes no file.
    """
    lock = FileLock(folder / NAME, thread_local=False)  # another thread may release it
    try:
        lock.acquire(blocking=False)
    except Timeout:
        allowed = "allowed is a folder of its own, or to wait for its end"
        raise ValueError(
            f"folder={str(folder)!r}: another process writes into it, as {what} would; {allowed}"
        ) from None
    return lock
