"""The same checks with Meta's `spmd_types`: its rules for the course's operators, from their words.

The package types tensors with the same four words, checks with the same table, and has operators of
its own. An autograd Function that it does not know states its rule in `spmd_typecheck`. Written for
spmd_types 0.3.1 (22 October 2026), a beta whose interface changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .declared import parse


def attach(operator: type, dimension: int = -1) -> None:
    """Give an autograd Function with `words` the typing rule that `spmd_types` looks for.

    dimension: along which V is cut. Raises ValueError for invalid words.
    """
    (src, *_), dst = parse(operator.words)
    rule = _rule(src, dst, dimension)
    # The rule is called with those arguments of `forward` that its signature names.
    ctx, *given = inspect.signature(operator.forward).parameters.values()
    named = [each.replace(kind=each.KEYWORD_ONLY, annotation=each.empty) for each in given]
    first = ctx.replace(name="out", annotation=ctx.empty)
    rule.__signature__ = inspect.Signature([first, *named])
    operator.spmd_typecheck = staticmethod(rule)


def _rule(src: str, dst: str, dimension: int) -> Callable[..., None]:
    def rule(out: Tensor, **given: Any) -> None:
        import spmd_types as spmd
        from spmd_types import rules

        x = next(value for value in given.values() if isinstance(value, Tensor))
        group = next(value for value in given.values() if isinstance(value, dist.ProcessGroup))
        others = [v for v in given.values() if isinstance(v, Tensor) and v is not x]
        word = {"I": spmd.I, "R": spmd.R, "P": spmd.P, "V": spmd.S(dimension)}
        if src == "P" or others:  # as in `core`, V may stand for P
            known = spmd.maybe_get_axis_local_type(x, group)
            pending = spmd.P if known is spmd.P else spmd.V
            move = rules.all_reduce if dst == "I" else rules.reduce_scatter
            if others:
                x = rules.einsum("bsv,bs->bs", x, *others)
            if out is x:
                move(x, group, src=pending, dst=word[dst], out=out)
                return
            made = move(x, group, src=pending, dst=word[dst])
        else:
            move = rules.all_gather if src == "V" else rules.convert
            made = move(x, group, src=word[src], dst=word[dst])
        rules.output(out, made)

    return rule


def verdict(
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


def declare(x: Tensor, **words: str) -> Tensor:
    """Declare the type of `x`, as `tensor_types.declare` does; call it within `verdict`."""
    import spmd_types as spmd

    kinds = {"I": spmd.I, "R": spmd.R, "V": spmd.V, "P": spmd.P}
    return spmd.assert_type(x, {axis: kinds[word] for axis, word in words.items()})
