"""Declared types: a type for each axis of the mesh, which a tensor carries as an attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from .messages import TypeMismatch, locate_errors

AxisTypes = dict[str, str]  # axis -> type
TensorT = TypeVar("TensorT", bound=Tensor)
TYPES = ("I", "R", "V", "P")
GRADIENT_TYPES = {"I": "I", "R": "P", "V": "V", "P": "R"}  # a tensor's type -> its gradient's type
active_meshes: list[tuple[str, ...]] = []  # axes of the active checks, innermost last


def get_types(x: Tensor) -> AxisTypes | None:
    """Return the types of `x` by axis; None if its type is unknown."""
    return getattr(x, "rank_types", None)


def declare_types(x: TensorT, **types: str) -> TensorT:
    """Declare the type of `x` on each axis, or check it against the known type; return `x`.

    V may be declared P, because a local loss is a summand of the joint loss. A leaf without
    gradient that is the same on all ranks may be declared I, R or V. Raises ValueError for an
    unknown type or axis, and TypeMismatch if the known type contradicts.
    """
    _check_types(types)
    known = get_types(x) or {}
    for axis, type_ in types.items():
        have = known.get(axis, type_)
        free = x.is_leaf and not x.requires_grad and have in "IR" and type_ != "P"
        if have != type_ and (have, type_) != ("V", "P") and not free:
            with locate_errors(declare_types, [x]), TypeMismatch.add_axis(axis):
                raise TypeMismatch(f"the tensor is {have}, but is declared {type_}")
    x.rank_types = {**known, **types}
    return x


def declare_parameters(module: nn.Module, **types: str | Mapping[str, str]) -> None:
    """Declare the type of each parameter: one type for all, or one by name. Buffers become R.

    Messages then name the parameters. Raises ValueError for missing or unknown names.
    """
    for x in module.buffers():
        declare_types(x, **dict.fromkeys(types, "R"))
    named = dict(module.named_parameters())
    for axis, declared in types.items():
        by_name = dict.fromkeys(named, declared) if isinstance(declared, str) else dict(declared)
        if odd := by_name.keys() ^ named.keys():
            what = "is unknown or missing: must be the names of named_parameters()"
            raise ValueError(f"{axis}: {min(odd)!r} {what}")
        for name, parameter in named.items():
            parameter.tensor_name = name
            declare_types(parameter, **{axis: by_name[name]})


def override_types(x: TensorT, **types: str) -> TensorT:
    """Overwrite the type of `x`, for example after hooks that changed a gradient unseen."""
    _check_types(types)
    x.rank_types = {**(get_types(x) or {}), **types}
    return x


def _check_types(types: Mapping[str, str]) -> None:
    axes = active_meshes[-1] if active_meshes else types
    for axis, type_ in types.items():
        if axis not in axes:
            raise ValueError(f"axis={axis!r}: must be one of {', '.join(map(repr, axes))}")
        if type_ not in TYPES:
            raise ValueError(f"{axis}={type_!r}: must be one of {', '.join(map(repr, TYPES))}")


def parse_signature(signature: str) -> tuple[list[str], str]:
    """Parse "V, R -> I" to ["V", "R"], "I". Raises ValueError for anything else."""
    left, _, dst = (part.strip() for part in str(signature).partition("->"))
    sources = [src.strip() for src in left.split(",")]
    if not {*sources, dst} <= set(TYPES):
        what = "must have I, R, V or P for each input tensor, and for the result: 'I -> R'"
        raise ValueError(f"signature={signature!r}: {what}")
    return sources, dst
