"""The folder in which checkpoints will lie, as all ranks see it: names, renames, locks, room.

A checkpoint is whole once one rank has renamed it, and safe from a second job as long as a lock is
held (`shardlab.checkpoint.folder`). On one host both always work. On several, a local disk, a cache
of names or a mount whose locks are its own are found by trying: rank 0 acts, the others look.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .meet import Rendezvous

TRIAL = 8 * 2**20  # bytes that each rank writes
HELD = errno.errorcode[errno.EWOULDBLOCK]
PATIENCE = 5.0  # seconds that a network's file system may take to show what another host wrote


def examine(path: str, meeting: Rendezvous) -> dict[str, Any]:
    """Return whether this rank sees what rank 0 writes, renames and locks in the folder.

    Rank 0 makes a folder of its own in there, and everything happens in that; it goes at the end.
    """
    found: dict[str, Any] = {"error": None, "seen": False, "renamed": False, "locks": [], "free": 0}
    first, own = meeting.rank == 0, Path(path, f".doctor-{uuid.uuid4().hex[:8]}")

    def attempt(step: Callable[[], Any]) -> None:
        try:
            step()
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, type(error).__name__)
            found["error"] = found["error"] or f"{name}: {error.strerror or error}"

    def prepare() -> None:
        own.mkdir()
        (own / "token").touch()
        (own / "lock").touch()

    if first:
        attempt(prepare)
        meeting.publish("trial", str(own))
    meeting.barrier("folder is made")
    own = Path(meeting.read("trial", 0))
    found["seen"] = _comes_true(lambda: (own / "token").exists())
    attempt(lambda: found.update(free=os.statvfs(path).f_bavail * os.statvfs(path).f_frsize))
    meeting.barrier("token is read")
    if first:
        attempt(lambda: os.replace(own / "token", own / "renamed"))
    meeting.barrier("token is renamed")
    found["renamed"] = found["seen"] and _comes_true(
        lambda: (own / "renamed").exists() and not (own / "token").exists()
    )
    for name, call in (("flock", fcntl.flock), ("fcntl", fcntl.lockf)):
        with open(own / "lock" if found["seen"] else os.devnull, "r+b") as file:
            held = _lock(call, file) if first else ""
            meeting.barrier(f"{name} is held")
            held = held if first else _lock(call, file)
            meeting.barrier(f"{name} is tried")
        if found["seen"] and held != ("" if first else HELD):
            found["locks"].append(f"{name}: {held or 'was given while rank 0 held it'}")
    if found["seen"]:
        attempt(lambda: _write(own / f"written.{meeting.rank}"))
    meeting.barrier("folder is done")
    if first:
        shutil.rmtree(own, ignore_errors=True)
    return found


def _comes_true(condition: Callable[[], bool]) -> bool:
    """Return True if the condition holds within some seconds: names may be cached."""
    limit = time.monotonic() + PATIENCE
    while not (holds := condition()) and time.monotonic() < limit:
        time.sleep(0.05)
    return holds


def _lock(call: Callable[..., Any], file: Any) -> str:
    """Take a lock: "" if it is ours now, else the error's name."""
    try:
        call(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # POSIX allows EACCES, too, for a lock that somebody holds
        return errno.errorcode.get(error.errno or 0, str(error)).replace("EACCES", HELD)
    return ""


def _write(path: Path) -> None:
    """Write something, down to the disk: a quota says so only then."""
    with open(path, "wb") as file:
        file.write(os.urandom(TRIAL))
        file.flush()
        os.fsync(file.fileno())
