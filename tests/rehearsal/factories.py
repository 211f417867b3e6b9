"""New tensors, on the requested device, and random numbers of each device."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import messages
from .machine import HERE, KIND, find
from .paint import CPU, device_of, normalize, paint, paint_of, paint_storage, plain, reserve

FROM_SHAPES = [
    "arange", "empty", "empty_strided", "empty_permuted", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tril_indices",
    "triu_indices", "zeros",
]  # fmt: skip
FROM_DATA = ("tensor", "as_tensor", "asarray")
LIKE = [
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
]  # fmt: skip
NEW = [
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros",
]  # fmt: skip
DRAWN = ("rand", "randint", "randn", "randperm", "normal")


# --- random numbers


class Generator(torch._C.Generator):
    """torch.Generator with a pretended device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu"):
        self.paint = normalize(device)
        if self.paint.type == KIND:
            HERE.touch()

    device = property(lambda self: self.paint)

    def get_state(self) -> Tensor:
        return paint(super().get_state(), CPU)

    def set_state(self, state: Tensor) -> Generator:
        if device_of(state) != CPU:
            find("generator", "RNG state must be a torch.ByteTensor (on the CPU)", TypeError)
        super().set_state(state)
        return self

    def manual_seed(self, seed: int) -> Generator:
        super().manual_seed(seed)
        return self


GENERATORS: list[Generator] = []  # default generator of each GPU


def generator_device(generator: Any) -> torch.device:
    """Return a generator's device."""
    return getattr(generator, "paint", CPU)


@contextmanager
def own_numbers(device: torch.device) -> Iterator[None]:
    """Draw random numbers from the default generator of `device` inside the context."""
    host, own = torch.default_generator, GENERATORS[device.index]
    state = host.get_state()
    host.set_state(torch._C.Generator.get_state(own))
    try:
        yield
    finally:
        torch._C.Generator.set_state(own, host.get_state())
        host.set_state(state)


# --- new tensors


def is_faking() -> bool:
    """Return True if torch's FakeTensorMode is active."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _get_default_device() -> torch.device:
    """Return the default device: that of `with torch.device(...)`, or the CPU."""
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if type(mode).__name__ == "DeviceContext":
            return mode.device
    return CPU


def _bytes(name: str, args: Any, kwargs: Any) -> int:
    """Return the bytes of a large new tensor, so that it is refused before it is allocated."""
    if name not in ("empty", "zeros", "ones", "rand", "randn", "full"):
        return 0
    sizes = args[:1] if name == "full" else args
    if sizes and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    count = math.prod(n for n in sizes or kwargs.get("size", ()) if isinstance(n, int))
    return count * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize


def _from_shapes(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("device")
        if is_faking():
            return original(*args, **kwargs)
        mean = args[0] if name == "normal" and args else None
        device = (
            device_of(mean)
            if isinstance(mean, Tensor)
            else normalize(asked or _get_default_device())
        )
        if device.type not in ("cpu", KIND):  # `with torch.device("meta")` does not know `original`
            return original(*args, **(kwargs | {"device": device}))
        return _make_on(name, original, args, kwargs, device, asked is not None)

    return make


def _wrap_like(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        template = args[0] if args else kwargs.get("input")
        if is_faking() or not plain(template):
            return original(*args, **kwargs)
        asked = kwargs.get("device")
        device = paint_of(template) if asked is None else normalize(asked)
        if name == "new_tensor" and device is not None and device.type == KIND:
            messages.synchronized()
        return _make_on(name, original, args, kwargs, device, asked is not None)

    return make


def _make_on(
    name: str, original: Any, args: Any, kwargs: Any, device: torch.device | None, asked: bool
) -> Any:
    if device is None or device.type not in ("cpu", KIND):
        return original(*args, **kwargs)
    generator = kwargs.get("generator")
    if generator is not None and (kind := generator_device(generator).type) != device.type:
        text = f"torch.{name}: Expected a '{device.type}' device type for generator but found"
        find("generator", f"{text} '{kind}'")
    kwargs["device"] = CPU
    pinned = kwargs.pop("pin_memory", False)
    drawn = name.removesuffix("_like") in DRAWN and generator is None
    if device.type == KIND:
        HERE.touch()
        HERE.launch()
        reserve(_bytes(name, args, kwargs), device)
    if drawn and device.type == KIND:
        with own_numbers(device):
            result = original(*args, **kwargs)
    else:
        result = original(*args, **kwargs)
    # backward(GradientEdge) creates its ones on the output's device in C++
    caller = sys._getframe(2).f_code.co_filename
    guessed = asked and device == CPU and caller.endswith("torch/autograd/__init__.py")
    if plain(result) and "out" not in kwargs and not guessed:
        paint_storage(result.untyped_storage(), device)
        if pinned:
            result.untyped_storage().pinned = True
    return result


def _from_data(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        if is_faking():
            return original(data, *args, **kwargs)
        asked = kwargs.pop("device", None)
        was_tensor = plain(data)
        here = device_of(data) if was_tensor else _get_default_device() if asked is None else CPU
        device = here if asked is None else normalize(asked)
        if device.type not in ("cpu", KIND):
            return original(data, *args, device=device, **kwargs)
        pinned = kwargs.pop("pin_memory", False)
        result = original(data, *args, device=CPU, **kwargs)
        if plain(result) and paint_of(result) is None:
            paint(result, here if was_tensor else CPU)
        if pinned:
            result.untyped_storage().pinned = True
        if plain(result) and device_of(result) != device:  # numbers come from the host's memory
            leaf = name == "tensor" and result.requires_grad
            result = result.detach().to(device).requires_grad_() if leaf else result.to(device)
        return result

    return make


def install() -> None:
    """Replace torch's functions that make tensors, and its generators."""
    torch.Generator = Generator
    for index in range(max(HERE.gpus, 1)):
        generator = Generator()
        generator.paint = torch.device(KIND, index)
        GENERATORS.append(generator.manual_seed(index))
    for name in FROM_SHAPES:
        setattr(torch, name, _from_shapes(name, getattr(torch, name)))
    for name in FROM_DATA:
        setattr(torch, name, _from_data(name, getattr(torch, name)))
    for name in LIKE:
        setattr(torch, name, _wrap_like(name, getattr(torch, name)))
    for name in NEW:
        setattr(Tensor, name, _wrap_like(name, getattr(Tensor, name)))
    for name in ("from_numpy", "frombuffer", "from_file"):
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))


def _on_the_cpu(original: Any) -> Any:
    return functools.wraps(original)(lambda *a, **k: paint(original(*a, **k), CPU))
