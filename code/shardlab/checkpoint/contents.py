"""What lies in a checkpoint beside tensors, and how the tensors' names and shapes are compared."""

from __future__ import annotations

import io
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardlab.common import gpu

from .folder import CheckpointError, open_plain

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
Shapes = dict[str, dict[str, Any]]  # name of a tensor -> {"shape": [...], "dtype": "float32"}


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
        with open_plain(path) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
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
    problems = [
        f"{name} is {saved.get(name)} in the checkpoint, {here[name]} in this training"
        for name in ("optimizer", "schedule")
        if saved.get(name) != here[name]
    ]
    many, few = len(saved["parameter groups"]), len(here["parameter groups"])
    if many != few:
        text = f"parameter groups is {many} in the checkpoint, {few} in this training"
        problems.append(text)
    problems = problems or _other_tensors(saved["tensors"], here["tensors"])
    for number in range(0 if problems else few):
        # By place, as torch and schedules keep what is known of a group: so it has to be the same.
        groups, mine = saved["parameter groups"], here["parameter groups"][number]
        if mine != groups[number]:
            theirs = f"group {groups.index(mine)} of the checkpoint" if mine in groups else ""
            what = theirs or f"no group of the checkpoint, with {_some(mine)} in it"
            problems.append(f"parameter group {number} of this training is {what}")
    more = [f"and {len(problems) - 2} more such differences"] if len(problems) > 2 else []
    return problems[:2] + more


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3] or ["nothing"]) + more


def _other_tensors(saved: Shapes, here: Shapes) -> list[str]:
    """How names, shapes and types differ."""
    problems = []
    for words, names in (
        ("missing in the checkpoint", here.keys() - saved.keys()),
        ("in the checkpoint alone", saved.keys() - here.keys()),
    ):
        if names:
            problems.append(f"{words}: {_some(names)}")
    for name in sorted(here.keys() & saved.keys()):
        if saved[name] != here[name]:
            a, b = (f"{tensor['dtype']} {tensor['shape']}" for tensor in (saved[name], here[name]))
            problems.append(f"{name} is {a} in the checkpoint, {b} in this training")
    return problems


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
