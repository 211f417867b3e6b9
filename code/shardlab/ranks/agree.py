"""Checks of a group and a model that raise the same error on every rank."""

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
    """Return this rank's number in `group` and the group's size; ValueError if not a member."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"{name}={group!r}: allowed is a process group that holds this rank")
    return dist.get_rank(group), dist.get_world_size(group)


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """Return how long `group`'s run lets a rank wait, as the timeout for `dist.new_group`.

    gloo's default is half an hour, whatever limit the run has, and a rank left alone would wait
    that long. The result is the limit of `run`, or that given to `init_process_group`.
    """
    if worker._inside is not None:  # longer than the run's own limit, which names the rank at fault
        return timedelta(seconds=worker.MAX_SLOWDOWN * worker._inside.timeout + 30)
    return group.get_group_store().timeout


def check_trained(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError for a module without trainable parameters, or a group without this rank."""
    check_group(group)
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        kind = type(module).__name__
        raise ValueError(
            f"module={kind}: nothing in it can be trained; allowed are modules that can"
        )


def check_same(*groups: dist.ProcessGroup, wrong: str | None = None, **given: Any) -> None:
    """Raise the same ValueError on all ranks unless all were given the same values.

    One exchange, for objects that are made once. The error names the argument, and which world
    ranks gave which value. A module is compared by the names, shapes and dtypes of its parameters,
    a dataclass by its fields, anything else by `repr`. groups: one group, or several groups of each
    rank, the axes of a mesh, along which the values are exchanged in turn until all ranks have all.
    wrong: this rank's own problem, if any; then all ranks raise it.
    """
    parts = {name: _parts(value) for name, value in given.items()}
    told: list[Any] = [(dist.get_rank(), wrong, parts)]
    for group in groups:
        _, size = check_group(group)
        if size > 1 and dist.get_backend(group) != "fake":  # without other real ranks
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


# Checks already made: owner -> calls.
_asked: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def check_same_once(owner: Any, call: str, *groups: dist.ProcessGroup, **given: Any) -> None:
    """Run `check_same` only at the first `call` for `owner`, for functions that are called often.

    owner: a model or a group. Later calls send nothing, and byte counts of steps exclude the first.
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
    """Return a text for a value without addresses, which differ between processes."""
    if callable(value) or type(value).__repr__ is object.__repr__:
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def check_model(module: nn.Module, group: dist.ProcessGroup, **given: Any) -> None:
    """Raise ValueError unless all ranks of `group` have the same trainable model.

    Every rank of the group calls this, and all raise the same error: a rank that went on alone
    would wait for the others for ever. given: see `check_same`.
    """
    check_trained(module, group)
    kind = type(module).__name__
    if any(getattr(m, "sparse", False) is True for m in module.modules()):
        raise ValueError(f"module={kind}: its gradients are sparse; allowed are dense ones")
    check_same(group, **given, module=module)


def check_state(state: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless `state` has a tensor of the given shape for each name in `shapes`.

    For code that loads a plain model's state dict into parts of it; `shapes` are the plain model's.
    """
    given = {name: list(tensor.shape) for name, tensor in state.items()}
    wanted = {name: list(shape) for name, shape in shapes.items()}
    wrong = [name for name in wanted | given if given.get(name) != wanted.get(name)]
    if wrong:
        has, allowed = (those.get(wrong[0], "none") for those in (given, wanted))
        more = f"; {len(wrong)} names differ from the plain model's" if wrong[1:] else ""
        raise ValueError(f"state: {wrong[0]} has shape {has}; allowed is {allowed}{more}")
