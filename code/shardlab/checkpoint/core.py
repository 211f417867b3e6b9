"""Checkpoints that resume on any number of ranks, and stay intact if a save is killed.

torch.distributed.checkpoint (DCP) writes and reads the tensors: every rank writes its own shards,
and any number of ranks can read them. This module adds, in this order:

1. `Training`, the full state of a training run; `named_tensors`, `restore_training`: its tensors;
2. `begin_save`, `commit_save` and `prune_checkpoints`: a new folder for each save, an atomic rename
   that completes the checkpoint, and the removal of old checkpoints after the rename;
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
from shardlab.common.arguments import check_integer

from . import folder as files
from .folder import MANIFEST, OLD_PREFIX, SAVING_PREFIX, CheckpointError, Members, describe_error


@dataclass
class Training:
    """The state that a training run needs to resume as if it had not stopped.

    model: plain, wrapped in DataParallel (ours or torch's), sharded by `fully_shard`, or one with
    its own methods `checkpoint_tensors` and `restore` (and `checkpoint_name`, if its names differ),
    as in `zero` and `mesh`: the checkpoints are the same for all kinds.
    step: optimizer steps done. samples: position in the data, counted over all ranks, so that any
    number of ranks can divide the remaining data. `Checkpoints` saves random states.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    step: int = 0
    samples: int = 0

    @property
    def module(self) -> nn.Module:
        """The model without DataParallel's wrapper, which would prefix every name."""
        return files.unwrap_model(self.model)

    def describe_run(self) -> dict[str, Any]:
        """Return the manifest's entries for this run, for people and for comparison."""
        return {
            "step": self.step,
            "samples": self.samples,
            "optimizer": type(self.optimizer).__name__,
            "parameter groups": self.list_group_parameters(),
            "schedule": type(self.schedule).__name__ if self.schedule else None,
        }

    def list_group_parameters(self) -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups, on this rank."""
        rename = getattr(self.module, "checkpoint_name", files.strip_wrapper_names)
        names = {p: rename(name) for name, p in self.module.named_parameters()}
        return [sorted({names[p] for p in g["params"]}) for g in self.optimizer.param_groups]

    def get_non_tensor_state(self) -> dict[str, Any]:
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
    create = to_load and not optimizer.state
    gradients = [parameter.grad for parameter in module.parameters()]
    if create:
        optimizer.zero_grad()  # torch creates the tensors only if there are no gradients
    try:
        has_state = create or optimizer.state
        states = get_optimizer_state_dict(module, optimizer)["state"] if has_state else {}
        yield {"model": get_model_state_dict(module), "optimizer": states}
    finally:
        if create:
            optimizer.state.clear()
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = gradient


def restore_training(
    training: Training, state: dict[str, Any], non_tensor_state: dict[str, Any]
) -> None:
    """Load a checkpoint's tensors and other state into a training run; drop its gradients.

    A parameter without optimizer state in `state` has none in the optimizer afterwards.
    """
    module, optimizer = training.module, training.optimizer
    optimizer.zero_grad()  # gradients belong to the old weights
    has_own_methods = hasattr(module, "checkpoint_tensors")
    groups = optimizer.param_groups
    if has_own_methods:
        module.restore(optimizer, state)
    else:
        set_model_state_dict(module, state["model"])
        groups = get_optimizer_state_dict(module, optimizer)["param_groups"]  # parameters by name
    for group, saved in zip(groups, non_tensor_state["groups"], strict=True):
        group.update(saved)
    if not has_own_methods:
        loaded = {"state": state["optimizer"], "param_groups": groups}
        options = StateDictOptions(strict=False)  # a parameter without gradients has no state
        set_optimizer_state_dict(module, optimizer, loaded, options=options)
    if training.schedule:
        training.schedule.load_state_dict(non_tensor_state["schedule"])


def begin_save(root: Path, step: int) -> Path:
    """Remove incomplete saves from `root`, and create a new folder to save into."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if path.name.startswith((SAVING_PREFIX, OLD_PREFIX)):
            shutil.rmtree(path)
    complete = files.list_checkpoints(root)
    number = int(complete[-1].name.split("-")[0]) + 1 if complete else 1  # counts saves, not steps
    saving = root / f"{SAVING_PREFIX}{number:06d}-step-{step}"
    saving.mkdir()
    return saving


def commit_save(saving: Path, manifest: dict[str, Any]) -> Path:
    """Write the manifest into `saving`, and rename the folder to make it the current checkpoint.

    All files are synced to the disk before the rename: otherwise the kernel might write the rename
    first, and a power failure would leave a checkpoint that looks complete.
    """
    manifest["crc32"] = files.checksum_manifest(manifest)
    files.write_durably(saving / MANIFEST, json.dumps(manifest, indent=1).encode())
    files.fsync_path(saving)
    final = saving.with_name(saving.name.removeprefix(SAVING_PREFIX))
    os.rename(saving, final)  # atomic: from here on, the new checkpoint is the current one
    files.fsync_path(final.parent)
    return final


def prune_checkpoints(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints. Call it only after a commit."""
    for path in files.list_checkpoints(root)[:-keep]:
        deleting = path.with_name(OLD_PREFIX + path.name)
        os.rename(path, deleting)  # rename first: a half deleted checkpoint must not look complete
        shutil.rmtree(deleting)


class Checkpoints:
    """The checkpoints of one training run, in one folder that all ranks of `group` can reach.

    keep: number of complete checkpoints kept after a save. writer: makes DCP's storage writer for a
    path. All methods but `list_steps` are collective: every rank of `group` (None: the world) calls
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
            raise ValueError(f"folder={str(folder)!r}: must be a folder, but is a file")
        check_integer(keep=keep)
        self.keep, self.writer = keep, writer
        self.members = Members(group)
        self.members.check_same(folder=os.path.abspath(self.root), keep=keep)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None
        self._lock: Any = None  # the folder's lock, on rank 0 from the first save on

    def list_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, the current one last."""
        return [files.parse_step(path) for path in files.list_checkpoints(self.root)]

    def save(self, training: Training, wait: bool = True) -> Path | None:
        """Save the current state of `training`; return the folder, or None with wait=False.

        With wait=False the tensors are copied, and a thread writes the copies while training goes
        on. The next save, load, wait or close waits for the thread and raises its error. Raises
        CheckpointError if the save fails, which leaves all earlier checkpoints intact; ValueError
        if ranks are at different steps, and for a folder into which another job saves.
        """
        self.wait()
        files.check_optimizer(training)
        random = files.get_random_state(next(training.module.parameters()).device)
        small = {f"random-{self.members.rank}.pt": files.dump_weights_only(random, "random state")}
        state = files.dump_weights_only(training.get_non_tensor_state(), "optimizer and schedule")
        if self.members.rank == 0:  # all ranks serialize, so that all raise an error
            small["rest.pt"] = state
        with named_tensors(training) as tensors:
            entries = self._gather_entries(training, tensors, "step", "samples")
            saving = self.members.run_on_rank_0(lambda: self._lock_and_begin_save(entries))
            save = dcp.save if wait else dcp.async_save  # the latter returns after the copy
            try:
                storage = self.writer(saving)
                result = save(tensors, storage_writer=storage, process_group=self.members.group)
            except (Exception, CheckpointException) as error:
                result = error
            if wait:
                return self._finish_save(saving, result, small, entries)
        self._pending = self._thread.submit(self._finish_save, saving, result, small, entries)
        return None

    def wait(self) -> Path | None:
        """Wait for a save in the background; return its folder, or None without such a save."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def _gather_entries(self, training: Training, tensors: Any, *checked: str) -> dict[str, Any]:
        """Return the manifest's entries, merged over ranks; raise ValueError if ranks disagree."""
        mine = training.describe_run() | {"tensors": files.collect_shapes(tensors)}
        same = {name: mine[name] for name in ("optimizer", "schedule", *checked)}
        self.members.check_same(**same, **{"parameter groups": len(mine["parameter groups"])})
        return files.merge_entries(self.members.all_gather_object(mine))

    def _lock_and_begin_save(self, entries: dict[str, Any]) -> Path:
        """Lock the checkpoints' folder and create a new one to save into (rank 0 only)."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = folder_lock.lock_folder(self.root, "a job that saves checkpoints")
            return begin_save(self.root, entries["step"])
        except OSError as error:
            raise CheckpointError(f"{self.root}: not saved: {describe_error(error)}") from None

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock = self._lock.release()

    def _finish_save(
        self, saving: Path, result: Any, small: dict[str, bytes], entries: dict[str, Any]
    ) -> Path:
        """Write this rank's remaining files; once all ranks have, rank 0 renames the folder."""
        problem, mine = None, {}
        try:
            if isinstance(result, Future):
                result = result.result()
            if isinstance(result, BaseException):
                raise result
            for name, content in small.items():
                files.write_durably(saving / name, content)
            paths = [saving / name for name in small]
            paths += saving.glob(f"__{self.members.rank}_*")
            paths += [saving / ".metadata"] if self.members.rank == 0 else []
            mine = {path.name: files.describe_file(path) for path in sorted(paths)}
        except (Exception, CheckpointException) as error:
            problem = describe_error(error)
        reports = self.members.all_gather_object((problem, mine))
        return self.members.run_on_rank_0(lambda: self._commit_or_discard(saving, reports, entries))

    def _commit_or_discard(self, saving: Path, reports: list[Any], entries: dict[str, Any]) -> Path:
        """Rename the folder if every rank's files exist, then prune old ones (rank 0 only)."""
        manifest = {"format": files.FORMAT, "version": files.VERSION} | entries
        manifest |= {"ranks": self.members.size, "torch": torch.__version__}
        manifest["files"] = {name: sums for _, mine in reports for name, sums in mine.items()}
        problem = next((problem for problem, _ in reports if problem), None)
        problem = problem or files.describe_missing_files(saving, manifest["files"])
        try:
            final = None if problem else commit_save(saving, manifest)
        except OSError as error:
            problem = describe_error(error)
        if problem:
            problem += files.describe_full_disk(self.root, files.count_bytes(entries["tensors"]))
            shutil.rmtree(saving, ignore_errors=True)  # frees space, in case the disk is full
            raise CheckpointError(f"{saving}: not saved: {problem}")
        prune_checkpoints(self.root, self.keep)
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
        folder = self.members.run_on_rank_0(lambda: files.select_checkpoint(self.root, step))
        manifest = self.members.run_on_rank_0(lambda: files.read_manifest(folder))
        mine = sorted(manifest["files"])[self.members.rank :: self.members.size]
        self.members.raise_on_all_ranks(files.find_damage(folder, manifest["files"], mine))
        state = files.load_weights_only(folder / "rest.pt")
        with named_tensors(training, to_load=True) as tensors:
            files.drop_unsaved_state(tensors, manifest["tensors"])
            entries = self._gather_entries(training, tensors)
            if mismatches := "; ".join(files.find_mismatches(manifest, entries)):
                raise CheckpointError(f"{folder}: does not match this run: {mismatches}")
            try:
                dcp.load(tensors, checkpoint_id=folder, process_group=self.members.group)
            except CheckpointException as error:  # the disk failed after the check
                text = f"{folder}: partly loaded, build `training` again: {describe_error(error)}"
                raise CheckpointError(text) from None
        training.step, training.samples = manifest["step"], manifest["samples"]
        restore_training(training, tensors, state)
        if manifest["ranks"] == self.members.size:
            random = files.load_weights_only(folder / f"random-{self.members.rank}.pt")
            files.set_random_state(random, next(training.module.parameters()).device)
        else:
            files.reseed_rank(training.step, self.members.rank)
        return manifest

    def close(self) -> None:
        """Wait for a save in the background, then release the thread, the group and the lock."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.members.close()
            self._release_lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:  # after an error other ranks may never get here: no collective
            self._thread.shutdown(wait=False)
            if self._pending is None:
                self._release_lock()
            else:  # the thread still writes: release the lock when it ends
                self._pending.add_done_callback(lambda _: self._release_lock())
