"""Saving and loading on all ranks: DCP for the tensors, our own folders for everything around."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardlab import ranks

from . import folder as files
from . import state as states
from .folder import CheckpointError
from .state import Training

# A process without ranks is fine here. A thread may be the one to warn: hence for good.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class Checkpoints:
    """The checkpoints of one training run, in one folder that all ranks of `group` can reach.

    keep: complete checkpoints that remain after a save. writer: makes DCP's storage writer for a
    path. timeout: seconds that a rank waits for another in a save or load, by default the run's.
    All methods but `steps` are collective: every rank of `group` calls them, and all of them raise
    the same error. Without a group, one process does everything.

    Raises ValueError for a folder that is a file, keep below 1, a group without this rank, or a
    timeout that is no number above 0.
    """

    def __init__(
        self,
        folder: str | Path,
        group: dist.ProcessGroup | None = None,
        keep: int = 2,
        writer: Callable[[Path], dcp.StorageWriter] = dcp.FileSystemWriter,
        timeout: float | None = None,
    ):
        if not isinstance(folder, (str, os.PathLike)):
            raise ValueError(f"folder={folder!r}: allowed are a name and a Path")
        self.root = Path(folder)
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"folder={str(folder)!r}: this is a file; allowed is a folder")
        ranks.agree.check_whole(keep=keep)
        if timeout is not None:
            ranks.check_number(timeout=timeout)
        if group is not None and (
            not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0
        ):
            raise ValueError(f"group={group!r}: allowed are None or a group that holds this rank")
        self.keep, self.writer, self.group = keep, writer, group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        if group is not None:
            # A group of its own, on the CPU: a save in the background sends messages at moments
            # that nobody knows, and they must not meet those of training.
            members = dist.get_process_group_ranks(group)
            whole = len(members) == dist.get_world_size()
            # Without ranks that are no members, a group's name is made from its members, and after
            # it was destroyed the same members would wait for one another under that name.
            self._destroy = whole
            limit = ranks.agree.time_limit(group) if timeout is None else timedelta(seconds=timeout)
            self.group = dist.new_group(
                members, limit, backend="gloo", use_local_synchronization=not whole
            )
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None
        self._lock: Any = None

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, the current one last."""
        return [files.step_of(path) for path in files.complete(self.root)]

    def save(self, training: Training, wait: bool = True) -> Path | None:
        """Save `training` as it is now; return the folder, or None at once with wait=False.

        With wait=False the tensors are copied, and a thread writes the copies while training goes
        on. The next save, load, wait or close waits for it and raises what went wrong in it.
        Raises CheckpointError; the checkpoints from before are then still there.
        """
        self.wait()
        states.check(training, "step", "samples")
        device = next(training.module.parameters()).device
        small = {f"random-{self.rank}.pt": states.pack(states.random_state(device), "random state")}
        rest = states.pack(training.rest(), "optimizer and schedule")  # refused on every rank alike
        if self.rank == 0:
            small["rest.pt"] = rest
        about = training.about()
        saving = self._first(lambda: self._begin(training.step))
        with states.gathered(training) as tensors:
            shapes = states.tensors(tensors)
            save = dcp.save if wait else dcp.async_save  # the latter copies, and then returns
            try:
                storage = self.writer(saving)
                written = save(tensors, storage_writer=storage, process_group=self.group)
            except (Exception, CheckpointException) as error:
                written = error
            if wait:
                return self._finish(saving, written, small, about, shapes)
        self._pending = self._thread.submit(self._finish, saving, written, small, about, shapes)
        return None

    def wait(self) -> Path | None:
        """Wait for a save in the background; return its folder, or None if there was none."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def _begin(self, step: int) -> Path:
        """On rank 0: a fresh folder, after a look whether another process saves here as well."""
        self._release()  # of a save that an error ended before it had written anything
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = files.lock(self.root)
            return files.begin(self.root, step)
        except OSError as error:
            self._release()
            raise CheckpointError(f"{self.root}: not saved: {_cause(error)}") from None

    def _release(self) -> None:
        if self._lock:
            self._lock = files.unlock(self._lock)

    def _finish(
        self,
        saving: Path,
        written: Any,
        small: dict[str, bytes],
        about: dict[str, Any],
        shapes: states.Shapes,
    ) -> Path:
        """When all ranks have written all: rank 0 makes the folder the current checkpoint."""
        problem, mine = None, {}
        try:
            if isinstance(written, Future):
                written = written.result()
            if isinstance(written, BaseException):
                raise written
            for name, content in small.items():
                files.write_durably(saving / name, content)
            paths = [saving / name for name in small] + list(saving.glob(f"__{self.rank}_*"))
            paths += [saving / ".metadata"] if self.rank == 0 else []
            mine = {path.name: files.describe(path) for path in sorted(paths)}
        except (Exception, CheckpointException) as error:
            problem = f"{saving}: not saved: {_cause(error)}"
        reports = self._exchange((problem, mine, shapes))
        problems = [problem for problem, _, _ in reports if problem]
        manifest: dict[str, Any] = {
            "format": files.FORMAT,
            "version": files.VERSION,
            **about,
            "ranks": self.size,
            "torch": torch.__version__,
            "files": {name: size for _, part, _ in reports for name, size in part.items()},
            "tensors": {name: shape for *_, part in reports for name, shape in part.items()},
        }

        def conclude() -> Path:
            try:
                unseen = [name for name in manifest["files"] if not (saving / name).exists()]
                if unseen and not problems:
                    text = f"{saving}: not saved: rank 0 does not see {', '.join(sorted(unseen))}"
                    problems.append(f"{text}: allowed is a folder that all ranks share")
                if problems:
                    raise CheckpointError(problems[0])
                manifest["crc32"] = files.checksum_of(manifest)
                final = files.commit(saving, manifest)
            except OSError as error:
                raise CheckpointError(f"{saving}: not saved: {_cause(error)}") from None
            finally:
                shutil.rmtree(
                    saving, ignore_errors=True
                )  # if it failed: on a full disk, room counts
                self._release()
            try:
                files.prune(self.root, self.keep)
            except OSError as error:
                text = f"{final}: saved, but what is older does not go: {_cause(error)}"
                raise CheckpointError(text) from None
            return final

        return self._first(conclude)

    def load(self, training: Training, step: int | None = None) -> dict[str, Any]:
        """Load the current checkpoint, or the newest one of `step`; return its manifest.

        Any number of ranks may load, into any of the kinds of model that Training names. All files
        are checked against sizes and checksums, and all names, shapes and types against
        `training`, before anything in it changes: CheckpointError says what does not fit. With
        another number of ranks than saved, random generators are seeded anew.
        """
        self.wait()
        states.check(training)
        folder = self._first(lambda: self._choose(step))
        manifest = self._first(lambda: files.read_manifest(folder))
        names = sorted(manifest["files"])[self.rank :: self.size]  # each rank reads its share
        self._agree(files.damage(folder, manifest["files"], names))
        fits = f"{folder}: does not fit this training: "
        self._agree(states.other_differences(manifest, training), fits)
        rest = states.unpack(folder / "rest.pt")
        with states.gathered(training) as tensors:
            parts = self._exchange(states.tensors(tensors))
            here = {name: shape for part in parts for name, shape in part.items()}
            self._agree(states.differences(manifest["tensors"], here), fits)
            try:
                dcp.load(tensors, checkpoint_id=folder, process_group=self.group)
            except CheckpointException as error:  # the disk failed since it was checked
                text = f"{folder}: half loaded, build `training` anew: {_cause(error)}"
                raise CheckpointError(text) from None
        states.restore(training, tensors, rest)
        training.step, training.samples = manifest["step"], manifest["samples"]
        if manifest["ranks"] == self.size:
            random = states.unpack(folder / f"random-{self.rank}.pt")
            states.set_random_state(random, next(training.module.parameters()).device)
        else:
            states.seed_anew(training.step, self.rank)
        return manifest

    def _choose(self, step: int | None) -> Path:
        """On rank 0: the folder to load from."""
        if step is not None:
            ranks.agree.check_whole(0, step=step)
        found = files.complete(self.root)
        if not found:
            raise CheckpointError(f"{self.root}: there is no complete checkpoint in it")
        chosen = [path for path in found if step is None or files.step_of(path) == step]
        if not chosen:
            raise ValueError(f"step={step!r}: allowed are {', '.join(map(str, self.steps()))}")
        return chosen[-1]

    def _exchange(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        everyone: list[Any] = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def _first(self, act: Callable[[], Any]) -> Any:
        """What `act` returns or raises on rank 0, on every rank."""
        result = error = None
        if self.rank == 0:
            try:
                result = act()
            except Exception as raised:
                error = raised
        result, error = self._exchange((result, error))[0]
        if error:
            raise error
        return result

    def _agree(self, problems: list[str], head: str = "") -> None:
        """Raise on every rank if one of them has found problems."""
        found = [text for part in self._exchange(problems) for text in part]
        if found:
            raise CheckpointError(head + "; ".join(dict.fromkeys(found)))

    def close(self) -> None:
        """Wait for a save in the background, and give the thread and the group back."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self.group is not None and self._destroy:
                dist.destroy_process_group(self.group)
            self.group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:  # others may never come to where this rank is: leave their messages alone
            with suppress(Exception):
                self._thread.shutdown(wait=False)


def _cause(error: BaseException) -> str:
    """The reason that DCP found, without the traceback that it puts around it."""
    failures = getattr(error, "failures", None)
    if not failures:
        return f"{type(error).__name__}: {error}"
    rank, (inner, _) = sorted(failures.items())[0]
    return f"rank {rank}: {type(inner).__name__}: {inner}"
