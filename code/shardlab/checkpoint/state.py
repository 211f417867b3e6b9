"""What a training run is made of, as tensors for DCP and as plain values for the manifest."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardlab.data_parallel import DataParallel
from shardlab.ranks.agree import check_group, check_whole
from shardlab.zero import Sharded

from .folder import CheckpointError

Shapes = dict[str, dict[str, Any]]  # name of a tensor -> {"shape": [...], "dtype": "float32"}


@dataclass
class Training:
    """All that a training run needs to go on as if it had not stopped.

    model: plain, wrapped in DataParallel (ours or torch's), or sharded by `fully_shard`: its
    checkpoints are the same. step: optimizer steps done. samples: position in the data, counted
    over all ranks, so that any number of ranks can share what comes next. The random state needs
    no field.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    step: int = 0
    samples: int = 0

    @property
    def module(self) -> nn.Module:
        """The model, out of DataParallel's wrapper, which would add to every name."""
        return self.model.module if isinstance(self.model, DataParallel) else self.model

    def check(self, *counts: str) -> None:
        """Raise ValueError for a model, and fields that count, that no checkpoint can hold."""
        if isinstance(self.model, Sharded):
            kind = type(self.model).__name__
            raise ValueError(
                f"model={kind}: its shards are no tensors with names; allowed are plain modules, "
                "DataParallel and fully_shard, and export() for this one"
            )
        check_whole(0, **{name: getattr(self, name) for name in counts})

    def about(self) -> dict[str, Any]:
        """What the manifest says of this run, for people and for comparison."""
        return {
            "step": self.step,
            "samples": self.samples,
            "optimizer": type(self.optimizer).__name__,
            "parameter groups": len(self.optimizer.param_groups),
            "schedule": type(self.schedule).__name__ if self.schedule else None,
        }

    def rest(self) -> dict[str, Any]:
        """What is left beside tensors: learning rates and the like, and the schedule's state."""
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        return {"groups": groups, "schedule": self.schedule.state_dict() if self.schedule else None}


def check(training: Training, *counts: str) -> None:
    """Raise ValueError for what is no training run, or one that no checkpoint can hold."""
    if not isinstance(training, Training):
        raise ValueError(f"training={training!r}: allowed is a shardlab.checkpoint.Training")
    kinds = {"model": nn.Module, "optimizer": torch.optim.Optimizer}
    for name, kind in kinds.items():
        if not isinstance(value := getattr(training, name), kind):
            raise ValueError(f"{name}={value!r}: allowed is a {kind.__name__} of torch")
    training.check(*counts)


@contextmanager
def gathered(training: Training) -> Iterator[dict[str, Any]]:
    """The tensors of model and optimizer, by name; they are the run's own, and no copies.

    An optimizer that has made no step has no tensors yet. torch gives it some by a step with
    gradients of zero, after which its counters say 1: inside they say 0, and afterwards the
    tensors are gone again, unless something has been loaded into them.
    """
    module, optimizer = training.module, training.optimizer
    fresh = not optimizer.state
    gradients = [parameter.grad for parameter in module.parameters()]
    if fresh:
        optimizer.zero_grad()  # with gradients there, torch would not make the tensors
    try:
        state = get_optimizer_state_dict(module, optimizer)["state"]
        if fresh:
            for values in state.values():
                if isinstance(values.get("step"), torch.Tensor):
                    values["step"].zero_()
        yield {"model": get_model_state_dict(module), "optimizer": state}
    finally:
        if fresh:
            optimizer.state.clear()
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = gradient


def restore(training: Training, state: dict[str, Any], rest: dict[str, Any]) -> None:
    """Put tensors and the rest of a checkpoint into a training run; its gradients go."""
    module, optimizer = training.module, training.optimizer
    optimizer.zero_grad()  # they belong to the weights from before
    set_model_state_dict(module, state["model"])
    groups = get_optimizer_state_dict(module, optimizer)["param_groups"]  # this model's own names
    for group, saved in zip(groups, rest["groups"], strict=True):
        group.update(saved)
    kept = {"state": state["optimizer"], "param_groups": groups}
    set_optimizer_state_dict(module, optimizer, kept)
    if training.schedule:
        training.schedule.load_state_dict(rest["schedule"])


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


def tensors(state: Mapping[str, Any], prefix: str = "") -> Shapes:
    """Name, whole shape and type of every tensor in nested dictionaries, by DCP's own names."""
    found: Shapes = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= tensors(value, f"{name}.")
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


def other_differences(saved: dict[str, Any], training: Training) -> list[str]:
    """The same for what is no tensor: the kinds of optimizer and schedule."""
    here = training.about()
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


def export(model: nn.Module, path: str | Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the whole model into one file, for plain `torch.load(path, weights_only=True)`.

    model: as in Training, or one of our own `zero`. All ranks of `group` call it, the group's rank
    0 gathers on the CPU and writes; its memory has to hold the model. The file appears under its
    name when it is complete.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r}: allowed is a Module of torch")
    if group is not None:
        check_group(group)
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"path={str(path)!r}: this is a folder; allowed is the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"path={str(path)!r}: there is no folder {path.parent}")
    if isinstance(model, Sharded):
        whole = model.full_state_dict()
    else:
        module = model.module if isinstance(model, DataParallel) else model
        sharded = any(hasattr(parameter, "full_tensor") for parameter in module.parameters())
        options = StateDictOptions(full_state_dict=sharded, cpu_offload=sharded)
        whole = get_model_state_dict(module, options=options)
    if group is None or dist.get_rank(group) == 0:
        beside = path.with_name(f".{path.name}.saving")
        with open(beside, "wb") as file:
            torch.save({name: tensor.cpu() for name, tensor in whole.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    if group is not None:
        dist.barrier(group)
