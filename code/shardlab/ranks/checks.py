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
from .gather import gather_objects
from .root_cause import format_ranks


def check_group(group: dist.ProcessGroup, name: str = "group") -> tuple[int, int]:
    """Return this rank's number in `group` and the group's size; ValueError if not a member."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"{name}={group!r}: must be a process group that contains this rank")
    return dist.get_rank(group), dist.get_world_size(group)


def get_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of `group`'s run, as the timeout for `dist.new_group`.

    gloo's default is half an hour, whatever limit the run has, and a rank left alone would wait
    that long. The result is the limit of `run`, or that given to `init_process_group`.
    """
    if (
        worker.current_job is not None
    ):  # longer than the run's own limit, which names the rank at fault
        return timedelta(seconds=worker.MAX_SLOWDOWN * worker.current_job.timeout + 30)
    return group.get_group_store().timeout


def check_trainable(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError for a module without trainable parameters, or a group without this rank."""
    check_group(group)
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        kind = type(module).__name__
        raise ValueError(f"module={kind}: must be a module with trainable parameters")


def check_same(*groups: dist.ProcessGroup, local_error: str | None = None, **values: Any) -> None:
    """Raise the same ValueError on all ranks unless all ranks passed the same values.

    One exchange, for objects that are made once. The error names the argument, and which world
    ranks passed which value. A module is compared by the names, shapes and dtypes of its
    parameters, a dataclass by its fields, anything else by `repr`. groups: one group, or several
    groups of each rank, the axes of a mesh, along which the values are exchanged in turn until all
    ranks have all. local_error: this rank's own problem, if any; then all ranks raise it.
    """
    parts = {name: _list_parts(value) for name, value in values.items()}
    entries: list[Any] = [(dist.get_rank(), local_error, parts)]
    for group in groups:
        _, size = check_group(group)
        if size > 1 and dist.get_backend(group) != "fake":  # a fake group has no other ranks
            entries = [entry for each in gather_objects(entries, group) for entry in each]
    for rank, error, _ in entries:
        if error is not None:
            raise ValueError(f"rank {rank}: {error}")
    for name in values:
        by_rank = (parts.get(name, ()) for *_, parts in entries)
        for texts in zip_longest(*by_rank, fillvalue="no further one"):
            if len(set(texts)) > 1:
                ranks_of: dict[str, list[int]] = {}
                for (rank, *_), text in zip(entries, texts, strict=True):
                    ranks_of.setdefault(text, []).append(rank)
                described = ", ".join(
                    f"{format_ranks(sorted(ranks))} {'has' if len(ranks) == 1 else 'have'} {text}"
                    for text, ranks in ranks_of.items()
                )
                raise ValueError(f"{name}: must be the same on all ranks, but {described}")


# Calls that were already checked, by owner.
_checked_calls: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def check_same_once(owner: Any, call: str, *groups: dist.ProcessGroup, **values: Any) -> None:
    """Run `check_same` only at the first `call` for `owner`, for functions that are called often.

    owner: a model or a group. Later calls send nothing, and byte counts of steps exclude the first.
    """
    calls = _checked_calls.setdefault(owner, set())
    if call not in calls:
        calls.add(call)
        with _disable_current_modes():
            check_same(*groups, **values)


def _list_parts(value: Any) -> list[str]:
    if isinstance(value, nn.Module):
        return [
            f"{name} {list(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
            for name, p in value.named_parameters()
        ]
    if is_dataclass(value):
        return [
            f"{field.name}={_format_value(getattr(value, field.name))}" for field in fields(value)
        ]
    return [_format_value(value)]


def _format_value(value: Any) -> str:
    """Return a text for a value without addresses, which differ between processes."""
    if callable(value) or type(value).__repr__ is object.__repr__:
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def check_model(module: nn.Module, group: dist.ProcessGroup, **values: Any) -> None:
    """Raise ValueError unless all ranks of `group` have the same trainable model.

    Every rank of the group calls this, and all raise the same error: a rank that went on alone
    would wait for the others for ever. values: see `check_same`.
    """
    check_trainable(module, group)
    kind = type(module).__name__
    if any(getattr(m, "sparse", False) is True for m in module.modules()):
        raise ValueError(f"module={kind}: must have dense gradients, and has a sparse embedding")
    check_same(group, **values, module=module)


def check_state(state: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless `state` has a tensor of the given shape for each name in `shapes`.

    For loading a plain model's state dict into a parallel model; `shapes` are the plain model's.
    """
    given = {name: list(tensor.shape) for name, tensor in state.items()}
    wanted = {name: list(shape) for name, shape in shapes.items()}
    wrong = [name for name in wanted | given if given.get(name) != wanted.get(name)]
    if wrong:
        shape, rule = (shapes.get(wrong[0], "none") for shapes in (given, wanted))
        more = f"; {len(wrong)} names or shapes differ from the plain model's" if wrong[1:] else ""
        raise ValueError(f"state[{wrong[0]!r}]: has shape {shape}, must have {rule}{more}")
