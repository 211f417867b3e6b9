"""What techniques ask of their group and their model first, on every rank alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardlab.arguments import check_bytes, check_number, check_whole

from . import worker

__all__ = [
    "check_bytes",
    "check_group",
    "check_model",
    "check_number",
    "check_state",
    "check_trained",
    "check_whole",
    "time_limit",
]


def check_group(group: dist.ProcessGroup, name: str = "group") -> tuple[int, int]:
    """This rank's number in `group` and the group's size; ValueError if it is not in there."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"{name}={group!r}: allowed is a process group that holds this rank")
    return dist.get_rank(group), dist.get_world_size(group)


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """How long `group`'s run lets a rank wait: for `dist.new_group`, whose own limit is longer.

    gloo's is half an hour, whatever limit the run has, and so long a rank that is left alone would
    wait. The limit is that of `run`, or what `init_process_group` was given.
    """
    if worker._inside is not None:  # twice, so that the caller's own clock is the first to ring
        return timedelta(seconds=2 * worker._inside.timeout + 30)
    return group.get_group_store().timeout


def check_trained(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError for a module without anything to train, or a group without this rank."""
    check_group(group)
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        kind = type(module).__name__
        raise ValueError(
            f"module={kind}: nothing in it can be trained; allowed are modules that can"
        )


def check_model(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError unless all ranks of `group` have the same model, one that can be trained.

    Every rank of the group calls it, and all of them raise the same error: a rank that went on
    alone would wait for the others for ever.
    """
    check_trained(module, group)
    kind = type(module).__name__
    if any(getattr(m, "sparse", False) is True for m in module.modules()):
        raise ValueError(f"module={kind}: its gradients are sparse; allowed are dense ones")
    mine = [
        f"{name} {list(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        for name, p in module.named_parameters()
    ]
    models: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(models, mine, group=group)
    for rank, theirs in enumerate(models):
        for a, b in zip_longest(models[0], theirs, fillvalue="no further parameter"):
            if a != b:
                raise ValueError(f"module: rank 0 of the group has {a}, rank {rank} has {b}")


def check_state(state: Any, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless `state` holds a tensor for each name in `shapes`, of that shape.

    For those who load a plain model's state dict into parts of it; `shapes` are the plain model's.
    """
    if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
        kind = type(state).__name__
        raise ValueError(f"state={kind}: allowed are tensors by the names of the plain model")
    problems = {
        "missing": [name for name in shapes if name not in state],
        "not the model's": [str(name) for name in state if name not in shapes],
    }
    told = [f"{', '.join(n[:3])} {what}; {len(n)} in all" for what, n in problems.items() if n]
    if told:
        raise ValueError(f"state: {'; '.join(told)}; allowed are the names of the plain model")
    for name, shape in shapes.items():
        if state[name].shape != tuple(shape):
            given, wanted = list(state[name].shape), list(shape)
            raise ValueError(f"state: {name} has shape {given}; allowed is {wanted}")
