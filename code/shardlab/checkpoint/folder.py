"""The files of a checkpoint: names, durable writes, checks for damage, and errors on all ranks.

In this order: names of folders, durable writes and checksums; the state besides tensors, and the
comparison of two lists of tensors; causes of failed writes; `Members`, the ranks.

A folder gets its final name by one rename, which is atomic: so a folder whose name does not begin
with a dot is complete. The number at the front of the name counts saves, not steps. So a run that
goes back to step 500 and saves step 600 again has the new step 600 as its current checkpoint.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shutil
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardlab import ranks
from shardlab.common import gpu
from shardlab.common.arguments import check_integer
from shardlab.data_parallel import DataParallel
from shardlab.ranks.gather import gather_objects

FORMAT, VERSION = "shardlab checkpoint", 2
MANIFEST = "manifest.json"
SAVING_PREFIX, OLD_PREFIX = ".saving-", ".old-"
_FOLDER_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_READ_CHUNK_BYTES = 2**20
_WRAPPER_NAMES = {"_orig_mod", "_checkpoint_wrapped_module"}
Shapes = dict[str, dict[str, Any]]  # name of a tensor -> {"shape": [...], "dtype": "float32"}

# A process without ranks is supported. The filter is permanent because a thread may warn later.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class CheckpointError(RuntimeError):
    """Error of a checkpoint that cannot be saved or used; it names the file and the problem."""


def list_checkpoints(root: Path) -> list[Path]:
    """Return the folders of complete checkpoints in `root`, the current one last."""
    if not root.is_dir():
        return []
    paths = [path for path in root.iterdir() if _FOLDER_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: int(path.name.split("-")[0]))


def parse_step(path: Path) -> int:
    """Return the training step of a checkpoint, from its folder's name."""
    match = _FOLDER_NAME.fullmatch(path.name)
    assert match, path
    return int(match[2])


def select_checkpoint(root: Path, step: int | None) -> Path:
    """Return the current checkpoint in `root`, or the newest one of `step`."""
    if step is not None:
        check_integer(0, step=step)
    found = list_checkpoints(root)
    if not found:
        raise CheckpointError(f"{root}: there is no complete checkpoint in this folder")
    chosen = [path for path in found if step is None or parse_step(path) == step]
    if not chosen:
        steps = ", ".join(str(parse_step(path)) for path in found)
        raise ValueError(f"step={step!r}: must be one of the saved steps ({steps})")
    return chosen[-1]


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, and return once it is on the disk, not only in the kernel's memory."""
    path.write_bytes(content)
    fsync_path(path)


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe_file(path: Path) -> dict[str, int]:
    """Return a file's size in bytes and its CRC-32, which detects damage but not forgery."""
    checksum = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_READ_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return {"bytes": size, "crc32": checksum}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; raise CheckpointError if it is missing or damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        kind = manifest["format"], manifest["version"]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing, so this is not a shardlab checkpoint") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged: {describe_error(error)}") from None
    if kind != (FORMAT, VERSION):
        raise CheckpointError(f"{path}: format and version must be {(FORMAT, VERSION)}, not {kind}")
    contents = {k: v for k, v in manifest.items() if k != "crc32"}
    if manifest.get("crc32") != checksum_manifest(contents):
        raise CheckpointError(f"{path}: damaged, its checksum differs from its contents")
    return manifest


def checksum_manifest(manifest: dict[str, Any]) -> int:
    """Return the CRC-32 of a manifest's contents, independent of key order and spacing."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def find_damage(folder: Path, files: dict[str, dict[str, int]], names: Iterable[str]) -> list[str]:
    """Check the files `names` against a checkpoint's `files`; return a message for each problem."""
    problems = []
    for name in names:
        path, saved = folder / name, files[name]
        try:
            now = describe_file(path)
        except FileNotFoundError:
            problems.append(f"{path}: is missing")
            continue
        if now["bytes"] != saved["bytes"]:
            problems.append(f"{path}: has {now['bytes']:,} bytes instead of {saved['bytes']:,}")
        elif now != saved:
            sums = f"{now['crc32']:08x} instead of {saved['crc32']:08x}"
            problems.append(f"{path}: damaged, its CRC-32 is {sums}")
    return problems


# The state besides tensors, and the comparison of tensors' names and shapes.


def check_optimizer(training: Any) -> None:
    """Raise ValueError if the optimizer has parameters that are not the model's."""
    known = {id(parameter) for parameter in training.model.parameters()}
    if any(id(p) not in known for g in training.optimizer.param_groups for p in g["params"]):
        kind = type(training.optimizer).__name__
        text = "must hold only the model's parameters: create it after the model is sharded"
        raise ValueError(f"optimizer={kind}: {text}")


def dump_weights_only(value: Any, name: str) -> bytes:
    """Serialize `value` so that torch.load can read it with weights_only=True.

    Such a file can hold numbers, strings, lists, dictionaries and tensors, but no code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise ValueError(f"{name}: must hold only plain values and tensors: {error}") from None
    return buffer.getvalue()


def load_weights_only(path: Path) -> Any:
    """Read a file of `dump_weights_only`, without running code that a pickle could contain."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def collect_shapes(state: Mapping[str, Any], prefix: str = "") -> Shapes:
    """Return the unsharded shape and dtype of every tensor in nested dicts, by DCP's names."""
    found: Shapes = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= collect_shapes(value, f"{name}.")
        else:  # a DTensor's shape is that of the unsharded tensor
            dtype = str(value.dtype).removeprefix("torch.")
            found[name] = {"shape": list(value.shape), "dtype": dtype}
    return found


def strip_wrapper_names(name: str) -> str:
    """Remove the parts of a parameter's name that torch's wrappers add, as DCP does."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model without DataParallel's wrapper, which would prefix every name."""
    return model.module if isinstance(model, DataParallel | DistributedDataParallel) else model


def count_bytes(tensors: Shapes) -> int:
    """Return the bytes of all `tensors`, unsharded."""
    return sum(
        math.prod(t["shape"]) * getattr(torch, t["dtype"]).itemsize for t in tensors.values()
    )


def merge_entries(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the ranks' entries for the manifest: a rank may have only some of the tensors."""
    groups = [part["parameter groups"] for part in parts]
    merged = [sorted({n for names in same for n in names}) for same in zip(*groups, strict=True)]
    counts = Counter(name for group in merged for name in group)
    if repeated := [name for name, count in counts.items() if count > 1]:
        text = f"must be equal on all ranks, but ranks have {min(repeated)} in different groups"
        raise ValueError(f"parameter groups: {text}")
    tensors = {name: shape for part in parts for name, shape in part["tensors"].items()}
    return parts[0] | {"parameter groups": merged, "tensors": tensors}


def drop_unsaved_state(state: dict[str, Any], saved: Shapes) -> None:
    """Remove the optimizer state of parameters from `state` that have none in `saved`.

    Such a parameter had never had a gradient before the save, and resumes without state.
    """
    known = set()
    for name in saved:
        while "." in name:
            known.add(name := name.rpartition(".")[0])
    for name in [name for name in state["optimizer"] if f"optimizer.{name}" not in known]:
        del state["optimizer"][name]


def find_mismatches(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """List the mismatches between a checkpoint's manifest `saved` and a run's entries `here`."""
    for name in ("optimizer", "schedule"):
        if saved[name] != here[name]:
            return [f"{name} is {saved[name]} in the checkpoint, {here[name]} in this run"]
    problems = []
    theirs, ours = saved["tensors"], here["tensors"]
    if missing := sorted(ours.keys() - theirs.keys()):
        problems.append(f"missing in the checkpoint: {', '.join(missing[:3])}")
    if extra := sorted(theirs.keys() - ours.keys()):
        problems.append(f"only in the checkpoint: {', '.join(extra[:3])}")
    for name in sorted(ours.keys() & theirs.keys()):
        if theirs[name] != ours[name]:
            a, b = (f"{t['dtype']} {t['shape']}" for t in (theirs[name], ours[name]))
            problems.append(f"{name} is {a} in the checkpoint, {b} in this run")
    # torch and schedules identify groups by their index, so groups must match in order.
    if not problems and saved["parameter groups"] != here["parameter groups"]:
        problems.append("parameter groups differ, or are in another order, in the checkpoint")
    more = [f"and {len(problems) - 2} more mismatches"] if len(problems) > 2 else []
    return problems[:2] + more


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of this rank's random generators: torch, GPU, Python, NumPy."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": gpu.get_device_module().get_rng_state(device) if gpu.is_gpu(device) else None,
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states of this rank's random generators."""
    torch.set_rng_state(state["torch"])
    if gpu.is_gpu(device) and state["cuda"] is not None:
        gpu.get_device_module().set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def reseed_rank(step: int, rank: int) -> None:
    """Seed the generators of a rank without saved state: reproducible, different on each rank."""
    seed = (step * 1_000_003 + rank) % 2**32
    torch.manual_seed(seed)  # also seeds CUDA
    random.seed(seed)
    np.random.seed(seed)


def describe_error(error: BaseException) -> str:
    """Describe the cause of an error: for DCP's errors, the error of the first failed rank."""
    for rank, (inner, _) in getattr(error, "failures", {}).items():
        return f"rank {rank}: {type(inner).__name__}: {inner}"
    return f"{type(error).__name__}: {error}"


def describe_missing_files(folder: Path, names: Iterable[str]) -> str | None:
    """Return a message if this rank does not see some files that other ranks have written."""
    missing = sorted(name for name in names if not (folder / name).exists())
    if not missing:
        return None
    return f"rank 0 does not see {', '.join(missing)}: use a folder that all ranks share"


def describe_full_disk(folder: Path, needed: int) -> str:
    """Return a message for a failed save if `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return ""
    return f": the disk is full: a save needs at least {needed:,} bytes, and {free:,} are free"


# Errors of one rank are raised on all ranks: otherwise the others would hang.


class Members:
    """The ranks that save and load together, in a process group of their own.

    A background save communicates at unpredictable moments, and in the training's group its
    messages would mix with training's. The new group uses Gloo, on the CPU. group: None is the
    world, or only this process if there are no ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size, self._destroy = 0, 1, False
        if group is None:
            if not dist.is_initialized():
                return
            group = dist.group.WORLD
        self.rank, self.size = ranks.check_group(group)
        global_ranks = dist.get_process_group_ranks(group)
        # With use_local_synchronization torch derives a group's name from its members. If such a
        # group is destroyed, creating it again under the same name would hang.
        self._destroy = len(global_ranks) == dist.get_world_size()
        limit = ranks.checks.get_timeout(group)
        self.group = dist.new_group(
            global_ranks, limit, backend="gloo", use_local_synchronization=not self._destroy
        )

    def all_gather_object(self, value: Any) -> list[Any]:
        """All-gather `value`; return the values of all ranks."""
        return [value] if self.group is None else gather_objects(value, self.group)

    def check_same(self, **given: Any) -> None:
        """Raise ValueError on all ranks unless all ranks pass equal arguments."""
        if self.group is not None:
            ranks.check_same(self.group, **given)

    def run_on_rank_0(self, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0, and return its result, or raise its error, on every rank."""
        result = error = None
        if self.rank == 0:
            try:
                result = function()
            except Exception as raised:
                error = raised
        result, error = self.all_gather_object((result, error))[0]
        if error is not None:
            try:
                raise error
            finally:
                del error  # breaks a reference cycle that would keep the folder's lock
        return result

    def raise_on_all_ranks(self, problems: list[str]) -> None:
        """Raise CheckpointError on every rank if any rank has found problems."""
        if found := [text for part in self.all_gather_object(problems) for text in part]:
            raise CheckpointError("; ".join(dict.fromkeys(found)))

    def close(self) -> None:
        """Destroy the process group."""
        if self._destroy:
            dist.destroy_process_group(self.group)
        self.group, self._destroy = None, False
