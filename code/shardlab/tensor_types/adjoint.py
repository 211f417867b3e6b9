"""Whether an operator is what its words say: numbers decide, on real ranks.

An operator y = A(x) over ranks and its backward dx = A'(dy) belong together when

    ⟨y, dy⟩ = ⟨x, dx⟩    for any x and dy

with products taken over all that ranks hold: once for I, which all of them have, and added up over
the ranks for R with P, V with V, P with R. Beside it, what has to be equal on all ranks must be,
and the one value that the ranks' tensors make must stay. No other words pass for Megatron's f and g
or the course's other operators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import ranks
from shardlab.ranks.gather import joined

from .declared import DUAL, parse

_ROUNDING = 1e-9  # of float64 sums of some hundred products of size 1


def disproof(
    operator: Callable[[Tensor, dist.ProcessGroup], Tensor],
    words: str,
    group: dist.ProcessGroup,
    shape: tuple[int, ...] = (2, 4, 8),
    dimension: int = -1,
) -> list[str]:
    """What speaks against `words`, as in "I -> R", of operator(x, group); [] where nothing does.

    shape: of a rank's x, of which the ranks divide `dimension`. dimension: along which V is cut.
    Every rank of the group calls it, with real ranks behind; all find the same.
    Raises ValueError for words that are none, and for operators of several tensors.
    """
    (src, *more), dst = parse(words)
    if more:
        raise ValueError(f"words={words!r}: allowed here are operators of one tensor")
    x = drawn(src, shape, group, 1).requires_grad_()
    y = operator(x, group)
    dy = drawn(DUAL[dst], y.shape, group, 2)
    (dx,) = torch.autograd.grad(y, x, dy)
    x, y = x.detach(), y.detach()
    found = []
    for name, word, tensor in (("y", dst, y), ("dx", DUAL[src], dx)):
        if word in "IR" and (gap := _apart(tensor, group)) > _ROUNDING:
            found.append(f"{name} differs from rank to rank by {gap:.2f}, and {word} is the same")
    before, after = _value(src, x, group, dimension), _value(dst, y, group, dimension)
    if before.shape != after.shape or not torch.allclose(before, after, rtol=_ROUNDING):
        found.append("the value changes: what ranks hold together is not what they held")
    over_y, over_x = _paired(dst, y, dy, group), _paired(src, x, dx, group)
    if abs(over_y - over_x) > _ROUNDING * max(1.0, abs(over_y)):
        found.append(f"⟨y, dy⟩ = {over_y:.2f}, and ⟨x, dx⟩ = {over_x:.2f}")
    return found


def drawn(word: str, shape: tuple[int, ...], group: dist.ProcessGroup, seed: int) -> Tensor:
    """Numbers of this word: the same on all ranks for I and R, others for V and P."""
    other = 0 if word in "IR" else 1000 * (1 + group.rank())
    generator = torch.Generator().manual_seed(seed + other)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(ranks.device())


def _paired(word: str, x: Tensor, dx: Tensor, group: dist.ProcessGroup) -> float:
    """The product of x and its gradient over all ranks. I is one tensor, and all have copies."""
    product = (x * dx).sum()
    if word != "I":
        dist.all_reduce(product, group=group)
    return product.item()


def _apart(x: Tensor, group: dist.ProcessGroup) -> float:
    """How far the ranks' tensors are from those of rank 0, at most."""
    first = x.contiguous().clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    gap = (x - first).abs().max()
    dist.all_reduce(gap, dist.ReduceOp.MAX, group=group)
    return gap.item()


def _value(word: str, x: Tensor, group: dist.ProcessGroup, dimension: int) -> Tensor:
    """The one tensor that the ranks hold together."""
    if word in "IR":
        return x
    if word == "P":
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total
    return joined(x, dimension, group)
