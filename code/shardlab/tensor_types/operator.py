"""The base class of operators that send: autograd Functions that a checker can see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .declared import meshes


class Operator(torch.autograd.Function):
    """An autograd Function that states its types in `words`, as in "I -> R".

    torch hands an ordinary Function to no TorchFunctionMode. While a check goes on, `apply` of this
    one is handed over like a function of torch's, and the checker goes by the words. An operator
    that is several in one has `plainly` in their place: the same, made of operators with words.
    """

    words: str

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Same as Function.apply, but visible to the checker."""
        tensors = tuple(x for x in args if isinstance(x, Tensor))
        if meshes and has_torch_function(tensors):
            return handle_torch_function(cls.apply, tensors, *args)
        return super().apply(*args)
