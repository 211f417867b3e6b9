"""The same by Meta's `spmd_types`: its rules for the course's operators, made from their words.

The package gives a tensor the same four words, checks the same table, and comes with operators of
its own. What it does not know it asks: an autograd Function says what it does in `spmd_typecheck`.
Written for spmd_types 0.3.1 (22 October 2026), a beta whose interface changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .declared import parse


def attach(operator: type, dimension: int = -1) -> None:
    """Give an autograd Function with `words` the rule that `spmd_types` looks for.

    dimension: along which V is cut. Raises ValueError for words that are none.
    """
    (src, *_), dst = parse(operator.words)
    rule = _rule(src, dst, dimension)
    # It is called with the arguments of `forward` that its signature names.
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
        if src == "P" or others:  # as here, V may be meant as P
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
    """What `spmd_types` says of step(make()): "" where it passes. `make` declares tensors.

    The first line of its error, whose context is long. Raises ImportError where it is not there.
    """
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    mesh = {axis: spmd.MeshAxis.of(group) for axis, group in axes.items()}
    with spmd.set_current_mesh(mesh):
        made = make()  # a random number is none of its business yet
        try:
            with typecheck():
                step(made)
        except spmd.SpmdTypeError as error:
            return str(error).splitlines()[0]
    return ""


def declare(x: Tensor, **words: str) -> Tensor:
    """`tensor_types.declare`, in the package's words; within `verdict`."""
    import spmd_types as spmd

    kinds = {"I": spmd.I, "R": spmd.R, "V": spmd.V, "P": spmd.P}
    return spmd.assert_type(x, {axis: kinds[word] for axis, word in words.items()})
