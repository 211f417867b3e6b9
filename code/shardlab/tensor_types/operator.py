"""The base class of communicating operators: autograd Functions that the checker can see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .declarations import active_meshes


class Operator(torch.autograd.Function):
    """An autograd Function that states its types in `signature`, such as "I -> R".

    torch passes no calls of ordinary Functions to a TorchFunctionMode. During a check, `apply` of
    this class is passed like a torch function, and the checker uses the signature. An operator that
    fuses several has `forward_unfused` instead: the same computation from operators with
    signatures.
    """

    signature: str

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Call Function.apply, visibly to the checker."""
        tensors = tuple(x for x in args if isinstance(x, Tensor))
        if active_meshes and has_torch_function(tensors):
            return handle_torch_function(cls.apply, tensors, *args)
        return super().apply(*args)
