"""What techniques ask of their group and their model first, on every rank alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from . import worker
from .blame import listed
from .gather import gathered


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
    if worker._inside is not None:  # longer than the run's own limit, which names the rank at fault
        return timedelta(seconds=worker.MAX_SLOWDOWN * worker._inside.timeout + 30)
    return group.get_group_store().timeout


def check_trained(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError for a module without anything to train, or a group without this rank."""
    check_group(group)
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        kind = type(module).__name__
        raise ValueError(
            f"module={kind}: nothing in it can be trained; allowed are modules that can"
        )


def check_same(*groups: dist.ProcessGroup, wrong: str | None = None, **given: Any) -> None:
    """Raise ValueError, the same on all ranks, unless all were given the same: one exchange.

    For what is made once. It names the argument, and which ranks of the world gave what. Of a
    module the names, shapes and dtypes of its parameters count, of a dataclass its fields, of all
    else what `repr` says. groups: the ranks of one; or several groups of each rank, the axes of a
    mesh: what one rank gave goes along each in turn, and so comes to all. wrong: what is wrong with
    what this rank has, whatever the others have: then all of them say so.
    """
    parts = {name: _parts(value) for name, value in given.items()}
    told: list[Any] = [(dist.get_rank(), wrong, parts)]
    for group in groups:
        _, size = check_group(group)
        if size > 1 and dist.get_backend(group) != "fake":  # whose other ranks do not exist
            told = [one for each in gathered(told, group) for one in each]
    for rank, problem, _ in told:
        if problem is not None:
            raise ValueError(f"rank {rank}: {problem}")
    for name in given:
        each = (gave.get(name, ()) for *_, gave in told)
        for values in zip_longest(*each, fillvalue="no further one"):
            if len(set(values)) > 1:
                who: dict[str, list[int]] = {}
                for (rank, *_), value in zip(told, values, strict=True):
                    who.setdefault(value, []).append(rank)
                has = ", ".join(
                    f"{listed(sorted(ranks))} {'has' if len(ranks) == 1 else 'have'} {value}"
                    for value, ranks in who.items()
                )
                raise ValueError(f"{name}: {has}; allowed is the same on all ranks")


# What has been asked already: owner -> calls.
_asked: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def check_same_once(owner: Any, call: str, *groups: dist.ProcessGroup, **given: Any) -> None:
    """`check_same` for what a function is given at every call: the first `call` for `owner` asks.

    owner: a model or a group. All later calls send nothing; and no step's count holds the first.
    """
    calls = _asked.setdefault(owner, set())
    if call not in calls:
        calls.add(call)
        with _disable_current_modes():
            check_same(*groups, **given)


def _parts(value: Any) -> list[str]:
    if isinstance(value, nn.Module):
        return [
            f"{name} {list(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
            for name, p in value.named_parameters()
        ]
    if is_dataclass(value):
        return [f"{field.name}={_said(getattr(value, field.name))}" for field in fields(value)]
    return [_said(value)]


def _said(value: Any) -> str:
    """Without addresses, which each process has of its own."""
    if callable(value) or type(value).__repr__ is object.__repr__:
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def check_model(module: nn.Module, group: dist.ProcessGroup, **given: Any) -> None:
    """Raise ValueError unless all ranks of `group` have the same model, one that can be trained.

    Every rank of the group calls it, and all of them raise the same error: a rank that went on
    alone would wait for the others for ever. given: see `check_same`.
    """
    check_trained(module, group)
    kind = type(module).__name__
    if any(getattr(m, "sparse", False) is True for m in module.modules()):
        raise ValueError(f"module={kind}: its gradients are sparse; allowed are dense ones")
    check_same(group, **given, module=module)


def check_state(state: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless `state` holds a tensor for each name in `shapes`, of that shape.

    For those who load a plain model's state dict into parts of it; `shapes` are the plain model's.
    """
    given = {name: list(tensor.shape) for name, tensor in state.items()}
    wanted = {name: list(shape) for name, shape in shapes.items()}
    wrong = [name for name in wanted | given if given.get(name) != wanted.get(name)]
    if wrong:
        has, allowed = (those.get(wrong[0], "none") for those in (given, wanted))
        more = f"; {len(wrong)} names differ from the plain model's" if wrong[1:] else ""
        raise ValueError(f"state: {wrong[0]} has shape {has}; allowed is {allowed}{more}")
