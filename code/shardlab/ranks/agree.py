"""What techniques ask of their group and their model first, on every rank alike."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import nn


def check_group(group: dist.ProcessGroup) -> tuple[int, int]:
    """This rank's number in `group` and the group's size; ValueError if it is not in there."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"group={group!r}: allowed is a process group that holds this rank")
    return dist.get_rank(group), dist.get_world_size(group)


def check_model(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError unless all ranks of `group` have the same model, one that can be trained.

    Every rank of the group calls it, and all of them raise the same error: a rank that went on
    alone would wait for the others for ever.
    """
    check_group(group)
    kind = type(module).__name__
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            f"module={kind}: nothing in it can be trained; allowed are modules that can"
        )
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


def check_bytes(**sizes: int) -> None:
    """Raise ValueError for a size, given by its argument's name, that is no number of bytes."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: allowed is a whole number of bytes, 1 or more")
