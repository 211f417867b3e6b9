"""Checks of the checkpoint folder, as all ranks see it: names, renames, locks, free space.

A checkpoint is complete once one rank has renamed it, and safe from a second job as long as a lock
is held (`shardlab.checkpoint.folder`). On one host both always work. On several, trials find a
local disk, a cache of names, or a mount with local locks: rank 0 acts, the others look.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .meet import Rendezvous

TRIAL = 8 * 2**20  # bytes that each rank writes
PATIENCE = 5.0  # seconds until a network file system must show what another host wrote
STEPS = 6  # steps of `_trial`


def examine(path: str, meeting: Rendezvous) -> dict[str, Any]:
    """Return the first thing that goes wrong for this rank in the folder, and its free bytes.

    All trials happen in a subfolder that rank 0 makes, and removes at the end.
    """
    found, own = {"fault": "", "free": 0}, Path(path, f".doctor-{uuid.uuid4().hex[:8]}")
    meeting.publish("trial", str(own))
    trial = _trial(path, meeting, found)
    for _ in range(STEPS):
        try:
            next(trial, None)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0)
            found["fault"] = f"{code}: {error.strerror}" if code else str(error)
        meeting.barrier()
    if meeting.rank == 0:
        shutil.rmtree(own, ignore_errors=True)
    return found


def _trial(path: str, meeting: Rendezvous, found: dict[str, Any]) -> Iterator[None]:
    """Yield at each barrier; an OSError ends this rank's part."""
    first, names = meeting.rank == 0, ("token", "flock", "fcntl")
    if first:
        own = Path(meeting.read("trial", 0))
        own.mkdir()
        for name in names:
            (own / name).touch()
    yield
    own = Path(meeting.read("trial", 0))
    space = os.statvfs(path)
    found["free"] = space.f_bavail * space.f_frsize
    if not all(_appears(own / name) for name in names):
        raise OSError("what rank 0 wrote is not seen")
    yield
    if first:
        (own / "token").rename(own / "renamed")
    yield
    if not _appears(own / "renamed") or (own / "token").exists():
        raise OSError("a rename is not seen")
    with open(own / "flock", "r+b") as one, open(own / "fcntl", "r+b") as other:
        locks = (fcntl.flock, one), (fcntl.lockf, other)
        for lock, file in locks if first else ():
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
        for lock, file in () if first else locks:
            try:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that is held
                continue
            raise OSError(f"a lock ({Path(file.name).name}) was given while rank 0 held it")
        yield
    with open(own / f"written.{meeting.rank}", "wb") as file:
        file.write(os.urandom(TRIAL))
        file.flush()
        os.fsync(file.fileno())  # an exceeded quota raises only here


def _appears(path: Path) -> bool:
    """Return True if the file appears within some seconds: names may be cached."""
    limit = time.monotonic() + PATIENCE
    while not (there := path.exists()) and time.monotonic() < limit:
        time.sleep(0.05)
    return there
