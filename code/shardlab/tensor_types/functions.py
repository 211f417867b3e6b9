"""How torch's functions treat addends of a sum that is still to be made.

Whatever a function computes, what is the same on all ranks gives what is the same, and one part of
a rank's own makes the result the rank's own. Addends alone ask what the function is: f(a) + f(b)
is f(a + b) for sums, for views and for products with what all ranks have, and for little else.

Functions go by their names, which torch.add, Tensor.add and operators share.
"""

from __future__ import annotations

from typing import Any

# Of addends alone, addends: a sum of sums, a part of a sum, a sum with another sign.
SUMS = {
    "add", "add_", "sub", "sub_", "neg", "neg_", "sum", "mean", "clone", "zeros_like", "cat",
    "stack", "detach", "detach_", "view", "view_as", "reshape", "reshape_as", "transpose",
    "permute", "flatten", "unflatten", "t", "squeeze", "unsqueeze", "expand", "expand_as",
    "movedim", "__getitem__", "narrow", "split", "chunk", "contiguous",
}  # fmt: skip
# Of one addend and what all ranks have, an addend.
PRODUCTS = {"mul", "mul_", "matmul", "mm", "bmm", "einsum"}
# The same for the first argument: a quotient, and a product to which something may be added.
FIRST = {"div", "div_", "linear"}
# Of the second argument these take the shape, or the dtype.
SHAPE_OF = {"view_as", "reshape_as", "expand_as", "type_as"}
# These take no part in what is computed, or give numbers and no tensors.
ASIDE = {
    "requires_grad_", "size", "dim", "numel", "stride", "element_size", "__len__", "item",
    "is_contiguous", "is_floating_point", "is_complex", "storage_offset", "untyped_storage",
    "data_ptr", "tolist", "__bool__", "__int__", "__float__", "__index__", "__hash__", "__repr__",
    "__format__", "register_hook", "register_post_accumulate_grad_hook", "is_same_size",
    "retain_grad", "get_device", "__set__",
}  # fmt: skip
# What these make is the same on all ranks.
EQUAL = {
    "arange", "zeros", "ones", "full", "tensor", "eye", "linspace", "new_zeros", "new_ones",
    "new_full", "new_tensor", "ones_like", "full_like",
}  # fmt: skip
# What these make is not known, or any: memory as it comes, random numbers, zeros in place.
UNKNOWN = {
    "empty", "empty_like", "new_empty", "rand", "randn", "randint", "randperm", "rand_like",
    "randn_like", "randint_like", "bernoulli", "normal", "normal_", "uniform_", "random_",
    "bernoulli_", "exponential_", "zero_", "trunc_normal_", "ones_", "zeros_",
}  # fmt: skip
# Attributes of a tensor that are views of it.
VIEWS = {"T", "mT", "H", "mH", "data", "real"}


def manner(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """How a function treats addends: "sum", "product", "first", or "other": it wants none."""
    numbers = [x for x in args[:2] if isinstance(x, int | float) and not isinstance(x, bool)]
    if name in SUMS:
        # A number that is added to an addend is added once by each rank.
        return "other" if numbers and name.rstrip("_") in ("add", "sub") else "sum"
    if name in FIRST:
        first = isinstance(args[0], int | float) or kwargs.get("rounding_mode")
        return "other" if first else "first"
    return "product" if name in PRODUCTS else "other"


def in_place(name: str) -> bool:
    """Whether a function changes its first argument."""
    return name == "__setitem__" or name.endswith("_") and not name.endswith("__")
