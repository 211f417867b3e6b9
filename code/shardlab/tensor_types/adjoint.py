"""A numerical test, on real ranks, that an operator has the types in its signature.

An operator y = A(x) over ranks and its backward dx = A'(dy) belong together when

    ⟨y, dy⟩ = ⟨x, dx⟩    for any x and dy

with products over all tensors that the ranks hold: once for I, of which all ranks have a copy, and
summed over the ranks for R with P, V with V, P with R. In addition, I and R must be equal on all
ranks, and the one value that the ranks' tensors represent must not change. For Megatron's f and g
and the course's other operators, no other types pass this test.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import ranks
from shardlab.ranks.gather import gather_parts

from .declarations import GRADIENT_TYPES, parse_signature

_ROUNDING = 1e-9  # float64: 2 n 2^-53 of n terms of size 1, up to n = 2,000


def find_contradictions(
    operator: Callable[[Tensor, dist.ProcessGroup], Tensor],
    signature: str,
    group: dist.ProcessGroup,
    shape: tuple[int, ...] = (2, 4, 8),
    dimension: int = -1,
) -> list[str]:
    """Return the evidence that operator(x, group) is not `signature` ("I -> R"); [] if none.

    shape: of a rank's x; the ranks divide `dimension`, along which V is cut. Every rank of the
    group calls this, on real ranks; all return the same. Raises ValueError for an invalid signature
    and for operators of several tensors.
    """
    (src, *more), dst = parse_signature(signature)
    if more:
        raise ValueError(f"signature={signature!r}: must have one input tensor")
    x = draw_tensor(src, shape, group, 1).requires_grad_()
    y = operator(x, group)
    dy = draw_tensor(GRADIENT_TYPES[dst], y.shape, group, 2)
    (dx,) = torch.autograd.grad(y, x, dy)
    x, y = x.detach(), y.detach()
    found = []
    for name, type_, tensor in (("y", dst, y), ("dx", GRADIENT_TYPES[src], dx)):
        if type_ in "IR" and (gap := _max_difference(tensor, group)) > _ROUNDING:
            found.append(f"{name} differs between ranks by {gap:.2f}: {type_} must be equal")
    before, after = _global_value(src, x, group, dimension), _global_value(dst, y, group, dimension)
    if before.shape != after.shape or not torch.allclose(before, after, rtol=_ROUNDING):
        found.append("the global value of y is not that of x")
    over_y, over_x = _inner_product(dst, y, dy, group), _inner_product(src, x, dx, group)
    if abs(over_y - over_x) > _ROUNDING * max(1.0, abs(over_y)):
        found.append(f"⟨y, dy⟩ = {over_y:.2f}, but ⟨x, dx⟩ = {over_x:.2f}")
    return found


def draw_tensor(type_: str, shape: tuple[int, ...], group: dist.ProcessGroup, seed: int) -> Tensor:
    """Draw a tensor of this type: the same on all ranks for I and R, different for V and P."""
    other = 0 if type_ in "IR" else 1000 * (1 + group.rank())
    generator = torch.Generator().manual_seed(seed + other)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(ranks.device())


def _inner_product(type_: str, x: Tensor, dx: Tensor, group: dist.ProcessGroup) -> float:
    """Return the product of x and its gradient over all ranks; I counts once, all have copies."""
    product = (x * dx).sum()
    if type_ != "I":
        dist.all_reduce(product, group=group)
    return product.item()


def _max_difference(x: Tensor, group: dist.ProcessGroup) -> float:
    first = x.contiguous().clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    gap = (x - first).abs().max()
    dist.all_reduce(gap, dist.ReduceOp.MAX, group=group)
    return gap.item()


def _global_value(type_: str, x: Tensor, group: dist.ProcessGroup, dimension: int) -> Tensor:
    if type_ in "IR":
        return x
    if type_ == "P":
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total
    return gather_parts(x, dimension, group)
