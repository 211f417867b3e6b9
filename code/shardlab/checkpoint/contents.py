"""What lies in a checkpoint beside tensors, and how the tensors' names and shapes are compared."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shardlab.ranks.agree import check_whole
from shardlab.zero import Sharded

from .folder import CheckpointError

Shapes = dict[str, dict[str, Any]]  # name of a tensor -> {"shape": [...], "dtype": "float32"}


def check(training: Any, kind: type, *counts: str) -> None:
    """Raise ValueError for what is no `kind` of training run, or one that no checkpoint can hold.

    counts: its fields that have to be whole numbers.
    """
    if not isinstance(training, kind):
        raise ValueError(f"training={training!r}: allowed is a shardlab.checkpoint.Training")
    for name, allowed in {"model": nn.Module, "optimizer": torch.optim.Optimizer}.items():
        if not isinstance(value := getattr(training, name), allowed):
            raise ValueError(f"{name}={value!r}: allowed is a {allowed.__name__} of torch")
    if isinstance(training.model, Sharded):
        raise ValueError(
            f"model={type(training.model).__name__}: its shards are no tensors with names; allowed "
            "are plain modules, DataParallel and fully_shard, and export() for this one"
        )
    check_whole(0, **{name: getattr(training, name) for name in counts})


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


def differences(saved: Shapes, here: Shapes) -> list[str]:
    """What keeps tensors that were `saved` from being loaded into those that are `here`."""
    problems = []
    for words, names in (
        ("missing in the checkpoint", here.keys() - saved.keys()),
        ("in the checkpoint alone", saved.keys() - here.keys()),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            problems.append(f"{words}: {', '.join(sorted(names)[:3])}{more}")
    for name in sorted(here.keys() & saved.keys()):
        if saved[name] != here[name]:
            a, b = (f"{tensor['dtype']} {tensor['shape']}" for tensor in (saved[name], here[name]))
            problems.append(f"{name} is {a} in the checkpoint, {b} in this training")
    more = [f"and {len(problems) - 2} more such differences"] if len(problems) > 2 else []
    return problems[:2] + more


def other_differences(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """The same for what is no tensor: the kinds of optimizer and schedule, from two manifests."""
    return [
        f"{name} is {saved.get(name)} in the checkpoint, {here[name]} in this training"
        for name in ("optimizer", "parameter groups", "schedule")
        if saved.get(name) != here[name]
    ]


def random_state(device: torch.device) -> dict[str, Any]:
    """Where the random generators of this rank stand: torch's, CUDA's, Python's, numpy's."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put this rank's generators back to where they stood."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def seed_anew(step: int, rank: int) -> None:
    """New random numbers for a rank that has no saved state: others on each rank, repeatable."""
    seed = (step * 1_000_003 + rank) % 2**32
    torch.manual_seed(seed)  # CUDA's as well
    random.seed(seed)
    np.random.seed(seed)
