"""Rules of Meta's `spmd_types` for the course's operators, made from the operators' signatures.

`spmd_types` has the same four types, checks with the same table, and has operators of its own. An
autograd Function that it does not know states its rule in `spmd_typecheck`. Written for spmd_types
0.3.1 (22 October 2026), a beta whose interface changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .declarations import parse_signature


def attach_rule(operator: type, dimension: int = -1) -> None:
    """Give an autograd Function with a `signature` the typing rule that `spmd_types` looks for.

    dimension: along which V is cut. Raises ValueError for an invalid signature.
    """
    (src, *_), dst = parse_signature(operator.signature)
    rule = _make_rule(src, dst, dimension)
    # The rule is called with those arguments of `forward` that its signature names.
    ctx, *given = inspect.signature(operator.forward).parameters.values()
    named = [each.replace(kind=each.KEYWORD_ONLY, annotation=each.empty) for each in given]
    first = ctx.replace(name="out", annotation=ctx.empty)
    rule.__signature__ = inspect.Signature([first, *named])
    operator.spmd_typecheck = staticmethod(rule)


def _make_rule(src: str, dst: str, dimension: int) -> Callable[..., None]:
    def apply_rule(out: Tensor, **given: Any) -> None:
        import spmd_types as spmd
        from spmd_types import rules

        x = next(value for value in given.values() if isinstance(value, Tensor))
        group = next(value for value in given.values() if isinstance(value, dist.ProcessGroup))
        others = [v for v in given.values() if isinstance(v, Tensor) and v is not x]
        types = {"I": spmd.I, "R": spmd.R, "P": spmd.P, "V": spmd.S(dimension)}
        if src == "P" or others:  # as in `core`, V may stand for P
            known = spmd.maybe_get_axis_local_type(x, group)
            pending = spmd.P if known is spmd.P else spmd.V
            move = rules.all_reduce if dst == "I" else rules.reduce_scatter
            if others:
                x = rules.einsum("bsv,bs->bs", x, *others)
            if out is x:
                move(x, group, src=pending, dst=types[dst], out=out)
                return
            made = move(x, group, src=pending, dst=types[dst])
        else:
            move = rules.all_gather if src == "V" else rules.convert
            made = move(x, group, src=types[src], dst=types[dst])
        rules.output(out, made)

    return apply_rule


def find_error(
    step: Callable[[Any], Any], make: Callable[[], Any], axes: Mapping[str, dist.ProcessGroup]
) -> str:
    """Return the error of `spmd_types` for step(make()); "" if it passes. `make` declares tensors.

    Only the first line of the error, which has a long context. Raises ImportError if not installed.
    """
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    mesh = {axis: spmd.MeshAxis.of(group) for axis, group in axes.items()}
    with spmd.set_current_mesh(mesh):
        made = make()  # outside of `typecheck`: random numbers would fail
        try:
            with typecheck():
                step(made)
        except spmd.SpmdTypeError as error:
            return str(error).splitlines()[0]
    return ""


def declare_types(x: Tensor, **types: str) -> Tensor:
    """Declare types of `x`, as `tensor_types.declare_types` does; call it in `find_error`."""
    import spmd_types as spmd

    kinds = {"I": spmd.I, "R": spmd.R, "V": spmd.V, "P": spmd.P}
    return spmd.assert_type(x, {axis: kinds[type_] for axis, type_ in types.items()})
