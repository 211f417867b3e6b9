"""Checks of the checkpoint folder, as all ranks see it: names, renames, locks, free space.

A checkpoint is complete once one rank has renamed it, and safe from a second job as long as a lock
is held (`shardlab.checkpoint.folder`). On one host both always work. On several, the trials detect
a local disk, a cache of names, or a mount with local locks: rank 0 acts, and the others look.
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

from .rendezvous import Rendezvous

TRIAL_BYTES = 8 * 2**20  # bytes that each rank writes
VISIBLE_SECONDS = 5.0  # a network file system must show other hosts' files by then
NUM_TRIALS = 6  # of `_run_trials`


def examine_folder(path: str, rendezvous: Rendezvous) -> dict[str, Any]:
    """Return this rank's first fault in the folder, and the free bytes.

    Rank 0 makes a subfolder for the trials, and removes it at the end.
    """
    found, own = {"fault": "", "free": 0}, Path(path, f".doctor-{uuid.uuid4().hex[:8]}")
    rendezvous.publish("trial", str(own))
    trials = _run_trials(path, rendezvous, found)
    for _ in range(NUM_TRIALS):
        try:
            next(trials, None)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0)
            found["fault"] = f"{code}: {error.strerror}" if code else str(error)
        rendezvous.barrier()
    if rendezvous.rank == 0:
        shutil.rmtree(own, ignore_errors=True)
    return found


def _run_trials(path: str, rendezvous: Rendezvous, found: dict[str, Any]) -> Iterator[None]:
    """Run the trials; yield at each barrier. An OSError ends the trials of this rank."""
    first, names = rendezvous.rank == 0, ("token", "flock", "fcntl")
    if first:
        own = Path(rendezvous.read("trial", 0))
        own.mkdir()
        for name in names:
            (own / name).touch()
    yield
    own = Path(rendezvous.read("trial", 0))
    space = os.statvfs(path)
    found["free"] = space.f_bavail * space.f_frsize
    if not all(_wait_for_file(own / name) for name in names):
        raise OSError("what rank 0 wrote is not seen")
    yield
    if first:
        (own / "token").rename(own / "renamed")
    yield
    if not _wait_for_file(own / "renamed") or (own / "token").exists():
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
    with open(own / f"written.{rendezvous.rank}", "wb") as file:
        file.write(os.urandom(TRIAL_BYTES))
        file.flush()
        os.fsync(file.fileno())  # an exceeded quota raises only here


def _wait_for_file(path: Path) -> bool:
    """Return True if the file appears in time (network file systems may cache names)."""
    limit = time.monotonic() + VISIBLE_SECONDS
    while not (exists := path.exists()) and time.monotonic() < limit:
        time.sleep(0.05)
    return exists
