"""Checkpoints that resume on any number of ranks, and stay intact if a save is killed.

torch.distributed.checkpoint (DCP) writes and reads the tensors: every rank writes its own shards,
and any number of ranks can read them. This module adds, in this order:

1. `Training`, the full state of a training run; `named_tensors` and `restore`, its tensors;
2. `begin`, `commit` and `prune`: a new folder for each save, an atomic rename that completes the
   checkpoint, and the removal of old checkpoints after the rename;
3. `Checkpoints`, which does all of this on all ranks, synchronously or in the background.

    runs/a/000006-step-500/          complete, the last but one
    runs/a/000007-step-600/          complete, the current checkpoint: the highest number
        manifest.json                step, world size, sizes and checksums of the other files, …
        .metadata, __0_0.distcp, …   DCP's files
        rest.pt                      hyperparameters of the optimizer, state of the schedule
        random-0.pt, …               the ranks' random states
    runs/a/.saving-000008-step-700/  incomplete: being written, or left by a save that was killed
    runs/a/.old-000005-step-400/     being deleted
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardlab.common import folder_lock
from shardlab.common.arguments import check_whole

from . import folder as files
from .folder import MANIFEST, OLD, SAVING, CheckpointError, Members, cause


@dataclass
class Training:
    """The state that a training run needs to resume as if it had not stopped.

    model: plain, wrapped in DataParallel (ours or torch's), sharded by `fully_shard`, or one with
    its own methods `checkpoint_tensors` and `restore` (and `checkpoint_name`, if its names differ),
    as in `zero` and `mesh`: the checkpoints are the same for all kinds.
    step: optimizer steps done. samples: position in the data, counted over all ranks, so that any
    number of ranks can divide the remaining data. The random state needs no field.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    step: int = 0
    samples: int = 0

    @property
    def module(self) -> nn.Module:
        """The model without DataParallel's wrapper, which would prefix every name."""
        return files.unwrapped(self.model)

    def about(self) -> dict[str, Any]:
        """Return the manifest's entries for this run, for people and for comparison."""
        return {
            "step": self.step,
            "samples": self.samples,
            "optimizer": type(self.optimizer).__name__,
            "parameter groups": self.groups(),
            "schedule": type(self.schedule).__name__ if self.schedule else None,
        }

    def groups(self) -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups, on this rank."""
        plain = getattr(self.module, "checkpoint_name", files.plain_name)
        names = {p: plain(name) for name, p in self.module.named_parameters()}
        return [sorted({names[p] for p in of["params"]}) for of in self.optimizer.param_groups]

    def rest(self) -> dict[str, Any]:
        """Return the state besides tensors: the groups' hyperparameters, the schedule's state."""
        groups = [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]
        return {"groups": groups, "schedule": self.schedule.state_dict() if self.schedule else None}


@contextmanager
def named_tensors(training: Training, to_load: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the tensors of model and optimizer by name, without copying them.

    An optimizer that has made no step has no tensors, and nor has its checkpoint. to_load: create
    the optimizer's tensors, for a checkpoint to fill. torch creates them by a step with zero
    gradients, which changes counters and some averages: they are removed when the context ends.
    """
    module, optimizer = training.module, training.optimizer
    if hasattr(module, "checkpoint_tensors"):  # shards that torch cannot name
        with module.checkpoint_tensors(optimizer, to_load) as tensors:
            yield tensors
        return
    make = to_load and not optimizer.state
    gradients = [parameter.grad for parameter in module.parameters()]
    if make:
        optimizer.zero_grad()  # torch creates the tensors only if there are no gradients
    try:
        has = make or optimizer.state
        states = get_optimizer_state_dict(module, optimizer)["state"] if has else {}
        yield {"model": get_model_state_dict(module), "optimizer": states}
    finally:
        if make:
            optimizer.state.clear()
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = gradient


def restore(training: Training, state: dict[str, Any], rest: dict[str, Any]) -> None:
    """Load a checkpoint's tensors and other state into a training run; drop its gradients.

    A parameter without optimizer state in `state` has none in the optimizer afterwards.
    """
    module, optimizer = training.module, training.optimizer
    optimizer.zero_grad()  # gradients belong to the old weights
    own = hasattr(module, "checkpoint_tensors")
    groups = optimizer.param_groups
    if own:
        module.restore(optimizer, state)
    else:
        set_model_state_dict(module, state["model"])
        groups = get_optimizer_state_dict(module, optimizer)["param_groups"]  # parameters by name
    for group, saved in zip(groups, rest["groups"], strict=True):
        group.update(saved)
    if not own:
        kept = {"state": state["optimizer"], "param_groups": groups}
        partly = StateDictOptions(strict=False)  # a parameter without gradients has no state
        set_optimizer_state_dict(module, optimizer, kept, options=partly)
    if training.schedule:
        training.schedule.load_state_dict(rest["schedule"])


def begin(root: Path, step: int) -> Path:
    """Remove incomplete saves from `root`, and create a new folder to save into."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if path.name.startswith((SAVING, OLD)):
            shutil.rmtree(path)
    done = files.complete(root)
    number = int(done[-1].name.split("-")[0]) + 1 if done else 1  # counts saves, not steps
    saving = root / f"{SAVING}{number:06d}-step-{step}"
    saving.mkdir()
    return saving


def commit(saving: Path, manifest: dict[str, Any]) -> Path:
    """Write the manifest into `saving`, and rename the folder to make it the current checkpoint.

    All files are synced to the disk before the rename: otherwise the kernel might write the rename
    first, and a power failure would leave a checkpoint that looks complete.
    """
    manifest["crc32"] = files.checksum_of(manifest)
    files.write_durably(saving / MANIFEST, json.dumps(manifest, indent=1).encode())
    files.sync(saving)
    final = saving.with_name(saving.name.removeprefix(SAVING))
    os.rename(saving, final)  # atomic: from here on, the new checkpoint is the current one
    files.sync(final.parent)
    return final


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints. Call it only after a commit."""
    for path in files.complete(root)[:-keep]:
        gone = path.with_name(OLD + path.name)
        os.rename(path, gone)  # rename first: a half deleted checkpoint must not look complete
        shutil.rmtree(gone)


class Checkpoints:
    """The checkpoints of one training run, in one folder that all ranks of `group` can reach.

    keep: number of complete checkpoints kept after a save. writer: makes DCP's storage writer for a
    path. All methods but `steps` are collective: every rank of `group` (None: the world) calls
    them, and all ranks raise the same error. From the first save until `close`, or the end of its
    process, this job locks the folder: other jobs can load from it, but their saves are refused.

    Raises ValueError for a folder that is a file, keep below 1, a group without this rank, and
    if ranks pass different folders or a different `keep`.
    """

    def __init__(
        self,
        folder: str | Path,
        group: dist.ProcessGroup | None = None,
        keep: int = 2,
        writer: Callable[[Path], dcp.StorageWriter] = dcp.FileSystemWriter,
    ):
        self.root = Path(folder)
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"folder={str(folder)!r}: this is a file; allowed is a folder")
        check_whole(keep=keep)
        self.keep, self.writer = keep, writer
        self.members = Members(group)
        self.members.check_same(folder=os.path.abspath(self.root), keep=keep)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None
        self._held: Any = None  # the folder's lock, on rank 0 from the first save on

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, the current one last."""
        return [files.step_of(path) for path in files.complete(self.root)]

    def save(self, training: Training, wait: bool = True) -> Path | None:
        """Save the current state of `training`; return the folder, or None with wait=False.

        With wait=False the tensors are copied, and a thread writes the copies while training goes
        on. The next save, load, wait or close waits for the thread and raises its error. Raises
        CheckpointError if the save fails, which leaves all earlier checkpoints intact; ValueError
        if ranks are at different steps, and for a folder into which another job saves.
        """
        self.wait()
        files.check_optimizer(training)
        random = files.random_state(next(training.module.parameters()).device)
        small = {f"random-{self.members.rank}.pt": files.pack(random, "random state")}
        rest = files.pack(training.rest(), "optimizer and schedule")  # raises on every rank
        if self.members.rank == 0:
            small["rest.pt"] = rest
        with named_tensors(training) as tensors:
            about = self._about(training, tensors, "step", "samples")
            saving = self.members.first(lambda: self._begin(about))
            save = dcp.save if wait else dcp.async_save  # the latter returns after the copy
            try:
                storage = self.writer(saving)
                written = save(tensors, storage_writer=storage, process_group=self.members.group)
            except (Exception, CheckpointException) as error:
                written = error
            if wait:
                return self._complete(saving, written, small, about)
        self._pending = self._thread.submit(self._complete, saving, written, small, about)
        return None

    def wait(self) -> Path | None:
        """Wait for a save in the background; return its folder, or None without such a save."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def _about(self, training: Training, tensors: Any, *alike: str) -> dict[str, Any]:
        """Return the manifest's entries, merged over ranks; raise ValueError if these disagree."""
        mine = training.about() | {"tensors": files.shapes(tensors)}
        words = {name: mine[name] for name in ("optimizer", "schedule", *alike)}
        self.members.check_same(**words, **{"parameter groups": len(mine["parameter groups"])})
        return files.joined(self.members.exchange(mine))

    def _begin(self, about: dict[str, Any]) -> Path:
        """Lock the checkpoints' folder and create a new one to save into (rank 0 only)."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if self._held is None:
                self._held = folder_lock.hold(self.root, "a job that saves checkpoints")
            return begin(self.root, about["step"])
        except OSError as error:
            raise CheckpointError(f"{self.root}: not saved: {cause(error)}") from None

    def _release(self) -> None:
        if self._held is not None:
            self._held = self._held.release()

    def _complete(
        self, saving: Path, written: Any, small: dict[str, bytes], about: dict[str, Any]
    ) -> Path:
        """Write this rank's remaining files; once all ranks have, rank 0 renames the folder."""
        problem, mine = None, {}
        try:
            if isinstance(written, Future):
                written = written.result()
            if isinstance(written, BaseException):
                raise written
            for name, content in small.items():
                files.write_durably(saving / name, content)
            paths = [saving / name for name in small]
            paths += saving.glob(f"__{self.members.rank}_*")
            paths += [saving / ".metadata"] if self.members.rank == 0 else []
            mine = {path.name: files.describe(path) for path in sorted(paths)}
        except (Exception, CheckpointException) as error:
            problem = cause(error)
        reports = self.members.exchange((problem, mine))
        return self.members.first(lambda: self._rename(saving, reports, about))

    def _rename(self, saving: Path, reports: list[Any], about: dict[str, Any]) -> Path:
        """Rename the folder if every rank's files exist, then prune old ones (rank 0 only)."""
        manifest = {"format": files.FORMAT, "version": files.VERSION} | about
        manifest |= {"ranks": self.members.size, "torch": torch.__version__}
        manifest["files"] = {name: of for _, part in reports for name, of in part.items()}
        problem = next((problem for problem, _ in reports if problem), None)
        problem = problem or files.unseen(saving, manifest["files"])
        try:
            final = None if problem else commit(saving, manifest)
        except OSError as error:
            problem = cause(error)
        if problem:
            problem += files.no_room(self.root, files.size(about["tensors"]))
            shutil.rmtree(saving, ignore_errors=True)  # frees space, in case the disk is full
            raise CheckpointError(f"{saving}: not saved: {problem}")
        prune(self.root, self.keep)
        return final

    def load(self, training: Training, step: int | None = None) -> dict[str, Any]:
        """Load the current checkpoint, or the newest one of `step`; return its manifest.

        Any number of ranks can load into any kind of model that `Training` supports. Before
        `training` changes, all files are checked against their sizes and checksums, and names,
        shapes, dtypes and parameter groups against `training`: CheckpointError names a mismatch.
        If the number of ranks differs from that of the save, random generators are reseeded.
        """
        self.wait()
        files.check_optimizer(training)
        self.members.check_same(step=step)
        folder = self.members.first(lambda: files.choose(self.root, step))
        manifest = self.members.first(lambda: files.read_manifest(folder))
        mine = sorted(manifest["files"])[self.members.rank :: self.members.size]
        self.members.agree(files.damage(folder, manifest["files"], mine))
        rest = files.unpack(folder / "rest.pt")
        with named_tensors(training, to_load=True) as tensors:
            files.leave_out(tensors, manifest["tensors"])
            if unfit := files.differences(manifest, self._about(training, tensors)):
                text = f"{folder}: does not fit this training: {'; '.join(unfit)}"
                raise CheckpointError(text)
            try:
                dcp.load(tensors, checkpoint_id=folder, process_group=self.members.group)
            except CheckpointException as error:  # the disk failed after the check
                text = f"{folder}: half loaded, build `training` anew: {cause(error)}"
                raise CheckpointError(text) from None
        training.step, training.samples = manifest["step"], manifest["samples"]
        restore(training, tensors, rest)
        if manifest["ranks"] == self.members.size:
            random = files.unpack(folder / f"random-{self.members.rank}.pt")
            files.set_random_state(random, next(training.module.parameters()).device)
        else:
            files.seed_anew(training.step, self.members.rank)
        return manifest

    def close(self) -> None:
        """Wait for a save in the background, then release the thread, the group and the lock."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.members.close()
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:  # after an error other ranks may never get here: no collective
            self._thread.shutdown(wait=False)
            if self._pending is None:
                self._release()
            else:  # the thread still writes: release the lock when it ends
                self._pending.add_done_callback(lambda _: self._release())
