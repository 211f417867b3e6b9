"""The folder of a checkpoint: what lies in it, how it lasts, and how all ranks know of a fault.

In this order: names, files that last, and what tells damage; what lies there beside tensors, and
how two lists of tensors differ; why a file could not be written; `Members`, the ranks.

A folder gets its final name by one rename, which a file system does entirely or not at all: so a
name without a dot at its front is a promise that everything is in it. The number at the front
counts saves and not steps, so that whoever goes back to step 500 and saves step 600 anew has a
current checkpoint with the new step 600 in it.
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
from shardlab.common.arguments import check_whole
from shardlab.data_parallel import DataParallel
from shardlab.ranks.gather import gathered

FORMAT, VERSION = "shardlab checkpoint", 2
MANIFEST = "manifest.json"
SAVING, OLD = ".saving-", ".old-"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_CHUNK = 2**20
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
Shapes = dict[str, dict[str, Any]]  # name of a tensor -> {"shape": [...], "dtype": "float32"}

# A process without ranks is fine here. A thread may be the one to warn: hence for good.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or used; the text names the file and says what is wrong."""


def complete(root: Path) -> list[Path]:
    """The folders of complete checkpoints in `root`, the current one last."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.split("-")[0]))


def step_of(path: Path) -> int:
    """The training step that a checkpoint's folder was saved after."""
    found = _NAME.fullmatch(path.name)
    assert found, path
    return int(found[2])


def choose(root: Path, step: int | None) -> Path:
    """The current checkpoint in `root`, or the newest one of `step`."""
    if step is not None:
        check_whole(0, step=step)
    found = complete(root)
    if not found:
        raise CheckpointError(f"{root}: there is no complete checkpoint in it")
    chosen = [path for path in found if step is None or step_of(path) == step]
    if not chosen:
        steps = ", ".join(str(step_of(path)) for path in found)
        raise ValueError(f"step={step!r}: allowed are {steps}")
    return chosen[-1]


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, and return when it is on the disk and not just in the kernel's memory."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, written to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe(path: Path) -> dict[str, int]:
    """The size of a file in bytes and its CRC-32, which finds damage (and stops no forger)."""
    checksum = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return {"bytes": size, "crc32": checksum}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError if it is none of ours, or damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        kind = manifest["format"], manifest["version"]
    except FileNotFoundError:
        text = f"{path}: there is no manifest, so this is no checkpoint of ours"
        raise CheckpointError(text) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged: {cause(error)}") from None
    if kind != (FORMAT, VERSION):
        raise CheckpointError(f"{path}: is {kind}; allowed is {(FORMAT, VERSION)}")
    contents = {k: v for k, v in manifest.items() if k != "crc32"}
    if manifest.get("crc32") != checksum_of(contents):
        raise CheckpointError(f"{path}: damaged, its own checksum does not fit")
    return manifest


def checksum_of(manifest: dict[str, Any]) -> int:
    """CRC-32 of a manifest's contents, whatever the order and the spacing they stand in."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def damage(folder: Path, files: dict[str, dict[str, int]], names: Iterable[str]) -> list[str]:
    """What is wrong with those of a checkpoint's `files` that have these `names`, in sentences."""
    problems = []
    for name in names:
        path, want = folder / name, files[name]
        try:
            here = describe(path)
        except FileNotFoundError:
            problems.append(f"{path}: is missing")
            continue
        if here["bytes"] != want["bytes"]:
            problems.append(f"{path}: has {here['bytes']:,} bytes instead of {want['bytes']:,}")
        elif here != want:
            sums = f"{here['crc32']:08x} instead of {want['crc32']:08x}"
            problems.append(f"{path}: damaged, its CRC-32 is {sums}")
    return problems


# What lies in a checkpoint beside tensors, and how tensors' names and shapes are compared.


def check_optimizer(training: Any) -> None:
    """Raise ValueError for an optimizer that trains something else than the model."""
    known = {id(parameter) for parameter in training.model.parameters()}
    if any(id(p) not in known for of in training.optimizer.param_groups for p in of["params"]):
        kind = type(training.optimizer).__name__
        text = "it trains what is no parameter of the model; allowed is one that was made of "
        raise ValueError(f"optimizer={kind}: {text}model.parameters(), once the model was sharded")


def pack(value: Any, name: str) -> bytes:
    """`value` as a file's content that torch.load reads with weights_only=True.

    Such a file can hold numbers, words, lists, dictionaries and tensors, and no code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise ValueError(f"{name}: allowed are plain values and tensors: {error}") from None
    return buffer.getvalue()


def unpack(path: Path) -> Any:
    """Read such a file, without running what a pickle might say."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def shapes(state: Mapping[str, Any], prefix: str = "") -> Shapes:
    """Name, whole shape and type of every tensor in nested dictionaries, by DCP's own names."""
    found: Shapes = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= shapes(value, f"{name}.")
        else:  # a DTensor's shape is that of the whole tensor
            dtype = str(value.dtype).removeprefix("torch.")
            found[name] = {"shape": list(value.shape), "dtype": dtype}
    return found


def plain_name(name: str) -> str:
    """A parameter's name without what torch's wrappers add to it, as DCP has it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model, out of DataParallel's wrapper, which would add to every name."""
    return model.module if isinstance(model, DataParallel | DistributedDataParallel) else model


def size(tensors: Shapes) -> int:
    """The bytes of such tensors, whole."""
    return sum(
        math.prod(of["shape"]) * getattr(torch, of["dtype"]).itemsize for of in tensors.values()
    )


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's words on a run, from what each of its ranks says: a rank may have a part."""
    groups = [part["parameter groups"] for part in parts]
    merged = [sorted({n for names in same for n in names}) for same in zip(*groups, strict=True)]
    twice = [name for name, times in Counter(n for of in merged for n in of).items() if times > 1]
    if twice:
        text = f"{min(twice)} is in one on some ranks, in another one on others"
        raise ValueError(f"parameter groups: {text}; allowed is the same on all ranks")
    tensors = {name: of for part in parts for name, of in part["tensors"].items()}
    return parts[0] | {"parameter groups": merged, "tensors": tensors}


def leave_out(state: dict[str, Any], saved: Shapes) -> None:
    """Take those states of an optimizer out of `state` whose parameter has none in `saved`.

    When it was saved, that parameter had never had a gradient; it goes on without.
    """
    known = set()
    for name in saved:
        while "." in name:
            known.add(name := name.rpartition(".")[0])
    for name in [name for name in state["optimizer"] if f"optimizer.{name}" not in known]:
        del state["optimizer"][name]


def differences(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What keeps a checkpoint, whose manifest is `saved`, from being loaded into a run."""
    for name in ("optimizer", "schedule"):
        if saved[name] != here[name]:
            return [f"{name} is {saved[name]} in the checkpoint, {here[name]} in this training"]
    problems = []
    there, mine = saved["tensors"], here["tensors"]
    if missing := sorted(mine.keys() - there.keys()):
        problems.append(f"missing in the checkpoint: {', '.join(missing[:3])}")
    if alone := sorted(there.keys() - mine.keys()):
        problems.append(f"in the checkpoint alone: {', '.join(alone[:3])}")
    for name in sorted(mine.keys() & there.keys()):
        if there[name] != mine[name]:
            a, b = (f"{of['dtype']} {of['shape']}" for of in (there[name], mine[name]))
            problems.append(f"{name} is {a} in the checkpoint, {b} in this training")
    # By place, as torch and schedules keep what is known of a group: so it has to be the same.
    if not problems and saved["parameter groups"] != here["parameter groups"]:
        problems.append("parameter groups are others, or in another order, in the checkpoint")
    more = [f"and {len(problems) - 2} more such differences"] if len(problems) > 2 else []
    return problems[:2] + more


def random_state(device: torch.device) -> dict[str, Any]:
    """Where the random generators of this rank stand: torch's, the GPU's, Python's, numpy's."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": gpu.module().get_rng_state(device) if gpu.is_on(device) else None,
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put this rank's generators back to where they stood."""
    torch.set_rng_state(state["torch"])
    if gpu.is_on(device) and state["cuda"] is not None:
        gpu.module().set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def seed_anew(step: int, rank: int) -> None:
    """New random numbers for a rank that has no saved state: others on each rank, repeatable."""
    seed = (step * 1_000_003 + rank) % 2**32
    torch.manual_seed(seed)  # CUDA's as well
    random.seed(seed)
    np.random.seed(seed)


def cause(error: BaseException) -> str:
    """Return the reason of an error: for one of DCP's, that of the first rank that failed."""
    for rank, (inner, _) in getattr(error, "failures", {}).items():
        return f"rank {rank}: {type(inner).__name__}: {inner}"
    return f"{type(error).__name__}: {error}"


def unseen(folder: Path, names: Iterable[str]) -> str | None:
    """Return a problem if this rank does not see some files that ranks have written."""
    missing = sorted(name for name in names if not (folder / name).exists())
    if not missing:
        return None
    return f"rank 0 does not see {', '.join(missing)}: allowed is a folder that all ranks share"


def no_room(folder: Path, needed: int) -> str:
    """Return what to add to a failed save if `needed` bytes are more than `folder` has free."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return ""
    return f": the disk is full: {needed:,} bytes and more are to be written, {free:,} are free"


# What one rank finds, all of them know, or raise: else the others would wait.


class Members:
    """The ranks that save and load together, in a group of their own.

    A save in the background sends messages at moments that nobody knows: in the group of training
    they would meet training's. The new one is gloo's, on the CPU. group: None is the world, as
    torch has it; a process without ranks is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size, self._destroy = 0, 1, False
        if group is None:
            if not dist.is_initialized():
                return
            group = dist.group.WORLD
        self.rank, self.size = ranks.check_group(group)
        numbers = dist.get_process_group_ranks(group)
        # Without ranks that are no members, a group's name is made from its members, and after
        # it was destroyed the same members would wait for one another under that name.
        self._destroy = len(numbers) == dist.get_world_size()
        limit = ranks.agree.time_limit(group)
        self.group = dist.new_group(
            numbers, limit, backend="gloo", use_local_synchronization=not self._destroy
        )

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        return [value] if self.group is None else gathered(value, self.group)

    def check_same(self, **given: Any) -> None:
        """Raise ValueError, the same on all ranks, unless all were given the same."""
        if self.group is not None:
            ranks.check_same(self.group, **given)

    def first(self, act: Callable[[], Any]) -> Any:
        """What `act` returns or raises on rank 0, on every rank."""
        result = error = None
        if self.rank == 0:
            try:
                result = act()
            except Exception as raised:
                error = raised
        result, error = self.exchange((result, error))[0]
        if error is not None:
            try:
                raise error
            finally:
                del error  # else this frame and the error would keep each other, and a folder held
        return result

    def agree(self, problems: list[str]) -> None:
        """Raise CheckpointError on every rank if one of them has found problems."""
        found = [text for part in self.exchange(problems) for text in part]
        if found:
            raise CheckpointError("; ".join(dict.fromkeys(found)))

    def close(self) -> None:
        """Give the group back."""
        if self._destroy:
            dist.destroy_process_group(self.group)
        self.group, self._destroy = None, False
