"""Random rounding errors for runs with noise, where a program rounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that add up many numbers, with the arguments in which they are linear.
LINEAR_ARGUMENTS = {
    "mm": "self", "bmm": "self", "addmm": "self mat1", "baddbmm": "self batch1", "sum": "self",
    "mean": "self", "index_put": "self values", "index_add": "self source",
    "scatter_add": "self src",
}  # fmt: skip


def move_by_ulp(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return `x` with a quarter of its numbers moved by one unit in the last place, up or down."""
    int_dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]
    x = x.detach().contiguous()
    drawn = torch.randint(8, x.shape, generator=generator, dtype=torch.uint8).to(x.device)
    step = (drawn == 0).to(int_dtype) - (drawn == 1).to(int_dtype)
    moved = (x.view(int_dtype) + step).view(x.dtype)
    return torch.where((x == 0) | ~moved.isfinite(), x, moved)


class RandomRounding(TorchDispatchMode):
    """A mode in which sums and casts round differently.

    Noise of one unit in the last place is smaller than the rounding of a partial sum:
    terms are multiplied by a random number, and their sum is divided by it, so that
    partial sums round anew. Casts to fewer bits (autocast, Muon) hide noise: a
    thousandth of their numbers move by a unit.
    """

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        scaled = _find_linear_arguments(func, args)
        factor = 0.5 + 0.5 * torch.rand((), generator=self.generator).item() if scaled else 1.0
        args = tuple(x * factor if n in scaled else x for n, x in enumerate(args))
        out = func(*args, **(kwargs or {}))
        if scaled and isinstance(out, tuple):
            return tuple(x / factor if isinstance(x, Tensor) else x for x in out)
        cast = func is torch.ops.aten._to_copy.default and type(out) is Tensor
        if cast and out.numel() and _is_narrower(out.dtype, args[0].dtype):
            return self._perturb_cast(out)
        return out / factor if scaled else out

    def _perturb_cast(self, x: Tensor) -> Tensor:
        """Move a thousandth of the numbers (at least one) by a unit in last place."""
        count = max(1, x.numel() // 1024)
        index = torch.randint(x.numel(), (count,), generator=self.generator).to(x.device)
        chosen = x.flatten()[index]
        changed = torch.where(chosen == 0, chosen, chosen * (1 + torch.finfo(x.dtype).eps))
        return x.flatten().index_put((index,), changed).view(x.shape)


def _is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    floats = dtype.is_floating_point and other.is_floating_point and dtype.itemsize > 1
    return floats and torch.finfo(dtype).eps > torch.finfo(other).eps


def _find_linear_arguments(func: Any, args: tuple[Any, ...]) -> list[int]:
    """Return the indices of the arguments in which a sum is linear; [] for no sum.

    Operators of backward are linear in their gradients. 16-bit numbers round too
    coarsely.
    """
    name = func._schema.name.removeprefix("aten::")
    names = LINEAR_ARGUMENTS.get(name, "grad" if name.endswith("backward") else "").split()
    pairs = enumerate(zip(args, func._schema.arguments, strict=False))
    indices = [n for n, (x, a) in pairs if isinstance(x, Tensor) and a.name.split("_")[0] in names]
    are_plain = all(type(args[n]) in (Tensor, torch.nn.Parameter) for n in indices)
    are_wide = all(args[n].is_floating_point() and args[n].element_size() > 2 for n in indices)
    return indices if are_plain and are_wide else []
