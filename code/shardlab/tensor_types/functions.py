"""Classes of torch functions, by their effect on summands of a sum that is not yet made.

For any function, equal inputs on all ranks give equal results, and an input that differs between
ranks makes the result differ. Only for summands (P) does the function matter: f(a) + f(b) is f(a +
b) for sums, views and products with a tensor that all ranks have, and for few others.

Functions are listed by name, which torch.add, Tensor.add and the operator share.
"""

from __future__ import annotations

from typing import Any

# Summands in, summands out: sums, views and parts, changes of sign.
LINEAR = {
    "add", "add_", "sub", "sub_", "neg", "neg_", "sum", "mean", "clone", "zeros_like", "cat",
    "stack", "detach", "detach_", "view", "view_as", "reshape", "reshape_as", "transpose",
    "permute", "flatten", "unflatten", "t", "squeeze", "unsqueeze", "expand", "expand_as",
    "movedim", "__getitem__", "narrow", "split", "chunk", "contiguous",
}  # fmt: skip
# A summand times tensors that all ranks have gives a summand.
PRODUCTS = {"mul", "mul_", "matmul", "mm", "bmm", "einsum"}
# The same for the first argument alone: quotients, and products with an added bias.
LINEAR_IN_FIRST = {"div", "div_", "linear"}
# These read only the shape or the dtype of the second argument.
SHAPE_OF_SECOND = {"view_as", "reshape_as", "expand_as", "type_as"}
# These compute nothing, or return no tensors.
NOT_CHECKED = {
    "requires_grad_", "size", "dim", "numel", "stride", "element_size", "__len__", "item",
    "is_contiguous", "is_floating_point", "is_complex", "storage_offset", "untyped_storage",
    "data_ptr", "tolist", "__bool__", "__int__", "__float__", "__index__", "__hash__", "__repr__",
    "__format__", "register_hook", "register_post_accumulate_grad_hook", "is_same_size",
    "retain_grad", "get_device", "__set__",
}  # fmt: skip
# The results of these are the same on all ranks.
REPLICATED = {
    "arange", "zeros", "ones", "full", "tensor", "eye", "linspace", "new_zeros", "new_ones",
    "new_full", "new_tensor", "ones_like", "full_like",
}  # fmt: skip
# The results of these have no known type: uninitialised memory, random numbers.
UNTYPED = {
    "empty", "empty_like", "new_empty", "rand", "randn", "randint", "randperm", "rand_like",
    "randn_like", "randint_like", "bernoulli", "normal", "normal_", "uniform_", "random_",
    "bernoulli_", "exponential_", "zero_", "trunc_normal_", "ones_", "zeros_",
}  # fmt: skip
# Attributes of a tensor that are views of it.
VIEWS = {"T", "mT", "H", "mH", "data", "real"}


def classify_function(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the class of a function for summands: "sum", "product", "first" or "other" (none)."""
    numbers = [x for x in args[:2] if isinstance(x, int | float) and not isinstance(x, bool)]
    if name in LINEAR:
        # Every rank would add the number to its summand.
        return "other" if numbers and name.rstrip("_") in ("add", "sub") else "sum"
    if name in LINEAR_IN_FIRST:
        first = isinstance(args[0], int | float) or kwargs.get("rounding_mode")
        return "other" if first else "first"
    return "product" if name in PRODUCTS else "other"


def is_in_place(name: str) -> bool:
    """Return True if a function changes its first argument in place."""
    return name == "__setitem__" or name.endswith("_") and not name.endswith("__")
