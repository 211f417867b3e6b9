"""A job's folder: one job's alone, one and the same for all ranks; its checkpoints are checked.

runs/a/.lock                 who writes here (`shardlab.folder_lock`)
runs/a/step-000500/          a checkpoint: DCP's files, and
    SHA256SUMS               their checksums, as `sha256sum --check` reads them
runs/a/.step-000600/         under way, or left by a save that was killed
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardlab import folder_lock
from shardlab.ranks import check_same

SUMS = "SHA256SUMS"


class Refused(ValueError):
    """What a job cannot go on with, raised on all ranks alike: one line says it for all of them."""


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, the newest last: by their number, not as text."""
    return sorted(folder.glob("step-*"), key=lambda path: (len(path.name), path.name))


class Complete(dcp.DefaultLoadPlanner):
    """Reads a checkpoint whose names are those of the run: none is missing, and none left over.

    Only what each rank has for itself may differ, as other ranks may go on, and the scaler, as
    another precision may. DCP's own planner names no tensor that only the checkpoint has.
    """

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)

    def create_local_plan(self) -> Any:
        """What this rank reads. Raises ValueError for names that are on one side alone."""
        here, there = set(self.state_dict), set(self.metadata.state_dict_metadata)
        own = tuple(f"state.{name}" for name in ("random state", "scaler"))
        alone = {name for name in here - there if not name.startswith(own)}
        alone |= {n for n in there - here if not n.startswith(own) and " rank " not in n}
        if alone:
            where = "checkpoint" if min(alone) in there else "run"
            text = f"{min(alone)} is in the {where} alone, and {len(alone) - 1} more names"
            raise ValueError(f"another model: {text}")
        return super().create_local_plan()


def seal(path: Path) -> None:
    """Note the checksums of a checkpoint's files, each rank's of its own. Every rank calls it."""
    rank = dist.get_rank()
    mine = [*path.glob(f"__{rank}_*"), *([path / ".metadata"] if rank == 0 else [])]
    found: dict[str, str] = {}
    for part in _of_all({file.name: _digest(file) for file in mine}):
        found |= part
    if rank == 0:  # the metadata come last, so that a file that was cut short lacks them
        lines = [f"{found[name]}  {name}\n" for name in sorted(found, reverse=True)]
        (path / SUMS).write_text("".join(lines))


def verify(path: Path) -> None:
    """Read all files of a checkpoint, each rank some of them; Refused where one is damaged."""
    problem = None
    try:
        lines = (path / SUMS).read_text().splitlines()
        noted = dict(reversed(line.split("  ", 1)) for line in lines)
        if ".metadata" not in noted:
            raise ValueError(f"{SUMS} is not whole")
        for name in sorted(noted)[dist.get_rank() :: dist.get_world_size()]:
            if _digest(path / name) != noted[name]:
                raise ValueError(f"{name} is damaged: its checksum is not the one in {SUMS}")
    except (OSError, ValueError) as error:
        allowed = "remove the folder to go on from an older one, or from the start"
        problem = f"{path} is no whole checkpoint: {error}; {allowed}"
    agree(problem)


def agree(problem: str | None) -> None:
    """Raise Refused on every rank where one has a problem. Every rank calls it."""
    if found := [text for text in _of_all(problem) if text]:
        raise Refused(found[0])


@contextmanager
def entered(folder: Path, options: dict[str, Any]) -> Iterator[None]:
    """Have `folder`, which is made, for this job alone. Every rank calls it.

    Raises Refused on all of them where it cannot be written, where another job has it, or where
    ranks differ: in `options`, in the folder that they see, or in its last checkpoint.
    """
    held = problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            held = folder_lock.hold(folder, "a training job")
            for path in folder.glob(".step-*"):  # of saves that were killed
                shutil.rmtree(path)
    except OSError as error:
        problem = (
            f"folder={str(folder)!r}: allowed are folders that can be written ({error.strerror})"
        )
    except ValueError as error:
        problem = str(error)
    try:
        agree(problem)
        _alike(folder, options)
        yield
    finally:
        if held:
            held.release()


def _alike(folder: Path, options: dict[str, Any]) -> None:
    """Refused where ranks were given, or see, what others do not."""
    lock = folder / folder_lock.NAME
    seen = {"what .lock in the folder says": lock.read_text() if lock.exists() else "nothing"}
    seen["the last checkpoint"] = ["none", *(path.name for path in checkpoints(folder))][-1]
    try:
        check_same(dist.group.WORLD, **options | seen)
    except ValueError as error:
        folders = ", ".join(dict.fromkeys(_of_all(str(folder))))
        raise Refused(f"{error}, and one folder that they share (now {folders})") from None


def _of_all(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
