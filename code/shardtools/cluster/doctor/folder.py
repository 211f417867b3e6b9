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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from .meet import Meeting

Facts = dict[str, Any]
TRIAL = 8 * 2**20  # bytes that each rank writes
_PATIENCE = 5.0  # seconds that a network's file system may take to show what another host wrote


def examine(path: str, meeting: Meeting) -> Facts:
    """Whether all ranks see the folder, what is renamed in it, and one another's locks.

    Rank 0 makes a folder of its own in there, and everything happens in that; it goes at the end.
    """
    found: Facts = {"error": None, "seen": False, "renamed": False, "locks": {}}
    own = Path(path, f".doctor-{uuid.uuid4().hex[:8]}")
    try:
        if meeting.rank == 0:
            meeting.tell("trial", _tried(partial(_prepare, own, found), found) and str(own))
        meeting.together("folder is made")
        trial = meeting.heard("trial", 0)
        found |= _room(path)
        if trial:
            _tried(partial(_look, Path(trial), meeting, found), found)
    finally:
        meeting.together("folder is done")
        if meeting.rank == 0:
            shutil.rmtree(own, ignore_errors=True)
    return found


def _tried(step: Callable[[], Any], found: Facts) -> bool:
    """Whether it went well; else `found` has the first error, in a line."""
    try:
        step()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        found["error"] = found["error"] or f"{name}: {error.strerror or error}"
        return False
    return True


def _prepare(own: Path, found: Facts) -> None:
    own.mkdir()
    (own / "token").write_text(own.name)
    (own / "lock").touch()


def _room(path: str) -> Facts:
    """Bytes and files that still fit, and the kind of file system."""
    about: Facts = {"free": None, "files": None, "type": None}
    with suppress(OSError):
        stat = os.statvfs(path)
        about = {"free": stat.f_bavail * stat.f_frsize, "type": _type(path)}
        about["files"] = stat.f_favail if stat.f_files else None
    return about


def _type(path: str) -> str | None:
    """The kind of file system of `path`: nfs4, lustre, ext4, tmpfs, …"""
    real, best = os.path.realpath(path), ("", None)
    for part in psutil.disk_partitions(all=True):
        point = part.mountpoint.rstrip("/") + "/"
        if (real + "/").startswith(point) and len(point) >= len(best[0]):
            best = point, part.fstype
    return best[1]


def _look(trial: Path, meeting: Meeting, found: Facts) -> None:
    """Every rank's part. All come to every step, whatever one of them fails at."""
    first = meeting.rank == 0
    found["seen"] = _within(lambda: (trial / "token").read_text() == trial.name)
    meeting.together("token is read")
    if first:
        _tried(lambda: os.replace(trial / "token", trial / "renamed"), found)
    meeting.together("token is renamed")
    found["renamed"] = found["seen"] and _within(
        lambda: (trial / "renamed").exists() and not (trial / "token").exists()
    )
    for name, call in (("flock", fcntl.flock), ("fcntl", fcntl.lockf)):
        with _opened(trial / "lock") as file:
            held = _lock(call, file) if first else None
            meeting.together(f"{name} is held")
            taken = None if first else _lock(call, file)
            meeting.together(f"{name} is tried")
            if first and held is True:
                call(file, fcntl.LOCK_UN)
            meeting.together(f"{name} is free")
            # Whoever waits gets it, one after another.
            after = _within(lambda c=call, f=file: _turn(c, f))
            found["locks"][name] = _judged(held, taken, after, first)
        meeting.together(f"{name} is done")
    begin = time.perf_counter()
    if found["seen"]:
        _tried(lambda: _write(trial / f"written.{meeting.rank}"), found)
        found["seconds"] = time.perf_counter() - begin


def _within(works: Callable[[], Any]) -> bool:
    """Whether it is so within some seconds: what a network's file system keeps may be older."""
    limit = time.monotonic() + _PATIENCE
    while True:
        with suppress(OSError):
            if works():
                return True
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)


def _opened(path: Path) -> Any:
    return open(path if path.exists() else os.devnull, "r+b")


def _lock(call: Any, file: Any) -> bool | str:
    """Whether the lock is ours now; the error's name where locks are not to be had at all."""
    try:
        call(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        return errno.errorcode.get(error.errno or 0, str(error))


def _turn(call: Any, file: Any) -> bool:
    if _lock(call, file) is not False:
        with suppress(OSError):
            call(file, fcntl.LOCK_UN)
        return True
    return False


def _judged(held: Any, taken: Any, after: bool, first: bool) -> str:
    """ "": this kind of lock works, seen from this rank."""
    got = held if first else taken
    if isinstance(got, str):
        return got
    if first:
        return "" if held else "a new file was locked already"
    if taken:
        return "was given while rank 0 held it"
    return "" if after else "was not given when it was free"


def _write(path: Path) -> None:
    """Write something, down to the disk: a quota says so only then."""
    with open(path, "wb") as file:
        file.write(os.urandom(TRIAL))
        file.flush()
        os.fsync(file.fileno())
