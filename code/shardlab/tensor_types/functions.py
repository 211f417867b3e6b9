"""How torch's functions treat addends of a sum that is still to be made.

Whatever a function computes, what is the same on all ranks gives what is the same, and one part of
a rank's own makes the result the rank's own. Addends alone ask what the function is: f(a) + f(b)
is f(a + b) for sums, for views and for products with what all ranks have, and for little else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

T = Tensor

# Of addends alone, addends: a sum of sums, a part of a sum, a sum with another sign.
SUMS = {
    T.add, T.add_, T.__add__, T.__radd__, T.__iadd__, torch.add,
    T.sub, T.sub_, T.__sub__, T.__isub__, torch.sub,
    T.neg, T.neg_, T.__neg__, torch.neg, T.sum, torch.sum, T.mean, torch.mean,
    T.clone, torch.clone, torch.zeros_like, torch.cat, torch.stack, T.detach, T.detach_,
    T.view, T.view_as, T.reshape, T.transpose, T.permute, T.flatten, T.unflatten, T.t, T.squeeze,
    T.unsqueeze, T.expand, T.reshape_as, T.expand_as, T.movedim, T.__getitem__, T.narrow, T.split,
    T.chunk, T.contiguous,
    torch.flatten, torch.transpose, torch.narrow, torch.split, torch.chunk, torch.squeeze,
    torch.unsqueeze, torch.reshape,
}  # fmt: skip
# Of one addend and what all ranks have, an addend.
PRODUCTS = {
    T.mul, T.mul_, T.__mul__, T.__rmul__, T.__imul__, torch.mul,
    T.matmul, torch.matmul, T.__matmul__, T.__rmatmul__, T.mm, torch.mm, T.bmm, torch.bmm,
    torch.einsum,
}  # fmt: skip
# The same for the first argument: a quotient, and a product to which something may be added.
FIRST = {T.div, T.div_, T.__truediv__, T.__itruediv__, torch.div, F.linear}
# Of the second argument these take the shape, or the dtype.
SHAPE_OF = {T.view_as, T.reshape_as, T.expand_as, T.type_as}
# These take no part in what is computed, or give numbers and no tensors.
ASIDE = {
    T.requires_grad_, T.size, T.dim, T.numel, T.stride, T.element_size, T.__len__, T.item,
    T.is_contiguous, T.is_floating_point, T.is_complex, T.storage_offset, T.untyped_storage,
    T.data_ptr, T.tolist, T.__bool__, T.__int__, T.__float__, T.__index__, T.__hash__, T.__repr__,
    T.__format__, T.register_hook, T.register_post_accumulate_grad_hook, T.is_same_size,
    T.retain_grad, torch.numel, torch.is_floating_point, torch.is_complex, T.get_device,
}  # fmt: skip
# What these make is the same on all ranks, and so is what they fill.
EQUAL = {
    torch.arange, torch.zeros, torch.ones, torch.full, torch.tensor, torch.eye, torch.linspace,
    T.new_zeros, T.new_ones, T.new_full, T.new_tensor, torch.ones_like, torch.full_like,
}  # fmt: skip
# What these make is not known: memory as it comes, and random numbers.
UNKNOWN = {
    torch.empty, torch.empty_like, T.new_empty, torch.rand, torch.randn, torch.randint,
    torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli,
    torch.normal, T.normal_, T.uniform_, T.random_, T.bernoulli_, T.exponential_, T.zero_,
}  # fmt: skip
# Attributes of a tensor that are views of it.
VIEWS = {"T", "mT", "H", "mH", "data", "real"}
_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"}


def manner(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """How `func` treats addends: "sum", "product", "first", or "other": it wants none."""
    numbers = [x for x in args[:2] if isinstance(x, int | float) and not isinstance(x, bool)]
    if func in SUMS:
        # A number that is added to an addend is added once by each rank.
        adds = getattr(func, "__name__", "").strip("_") in ("add", "radd", "iadd", "sub", "isub")
        return "other" if adds and numbers else "sum"
    if func in FIRST:
        return "other" if isinstance(args[0], int | float) else "first"
    return "product" if func in PRODUCTS else "other"


def in_place(func: Callable[..., Any]) -> bool:
    """Whether `func` changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or name.endswith("_") and not name.endswith("__")
