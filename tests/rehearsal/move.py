"""Moves between devices, and reads by the host: replacements for torch.Tensor's methods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import messages
from .factories import is_faking
from .machine import HERE, KIND, find
from .paint import (
    CPU,
    device_of,
    get_real_device,
    is_paintable,
    normalize,
    paint_storage,
    plain,
    reserve,
    update_size,
)

_to, _numpy, _array, _tolist = Tensor.to, Tensor.numpy, Tensor.__array__, Tensor.tolist


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        ctx.device, ctx.dtype = device_of(x), x.dtype
        return _convert(x, *how)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _convert(dy, ctx.device, ctx.dtype, False, None), None, None, None, None


def _convert(
    x: Tensor, device: torch.device, dtype: Any, non_blocking: bool, memory_format: Any
) -> Tensor:
    x = x.detach()
    reserve(x.nbytes, device)
    memory_format = memory_format or torch.preserve_format
    # The mode paints the result of C's factory like `x`, which is wrong here.
    y = torch._C._VariableFunctions.empty_like(x, dtype=dtype, memory_format=memory_format)
    paint_storage(y.untyped_storage(), device)
    if non_blocking and device == CPU:
        y.untyped_storage().pinned = True  # torch pins the target of a copy without waiting
    with torch.no_grad():
        return y.copy_(x, non_blocking=non_blocking)


def move(
    x: Tensor,
    device: Any,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """Move `x` to `device`, as torch.Tensor.to does."""
    device = device_of(x) if device is None else normalize(device)
    if device == device_of(x):
        more = {} if memory_format is None else {"memory_format": memory_format}
        return _to(x, dtype or x.dtype, non_blocking, copy, **more)
    if KIND in (device.type, device_of(x).type):
        HERE.touch()
    how = device, dtype, non_blocking, memory_format
    if x.requires_grad and torch.is_grad_enabled():
        return _Move.apply(x, *how)
    return _convert(x, *how)


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) or type(value) is int


def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Do torch.Tensor.to: (device, dtype), (dtype) or (other), then non_blocking and copy."""
    if is_faking() and not plain(self):
        return _to(self, *args, **kwargs)
    if not is_paintable(self):
        return _to_of_others(self, args, kwargs)
    rest, device, dtype = list(args), kwargs.pop("device", None), kwargs.pop("dtype", None)
    other = kwargs.pop("other", None)
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
    if other is not None:
        device, dtype = device_of(other), other.dtype
    else:
        if rest and (rest[0] is None or _is_device(rest[0])):
            device = rest.pop(0)
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype = rest.pop(0)
    options = dict(zip(("non_blocking", "copy"), rest, strict=False)) | kwargs
    if device is not None and torch.device(device).type == "meta":
        return _to(self, device, dtype or self.dtype, **options)
    return move(self, device, dtype, **options)


def _to_of_others(self: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Move a meta tensor, or a wrapper such as DTensor, which moves its inner tensors."""
    given = [v for v in (*args, kwargs.get("device")) if _is_device(v)]
    device = torch.device(given[0]) if given else None
    if plain(self):
        if get_real_device(self).type == "meta" and device is not None and device.type == KIND:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        return _to(self, *args, **kwargs)
    inner = getattr(self, "_local_tensor", None)
    if device is None or device.type == "meta" or inner is None:
        return _to(self, *args, **kwargs)
    dtype = next((v for v in (*args, kwargs.get("dtype")) if isinstance(v, torch.dtype)), None)
    if not plain(inner) or normalize(device) == device_of(self):
        return _to(self, dtype or self.dtype)
    # C++ would find it on the target already, and would not copy.
    result = self.clone() if dtype is None else _to(self, dtype, copy=True)
    messages.begin_copy(result._local_tensor, inner, False, normalize(device))
    paint_storage(result._local_tensor.untyped_storage(), normalize(device))
    return result


def _refused_on_a_gpu(self: Tensor) -> None:
    if plain(self) and device_of(self).type == KIND:
        text = f"can't convert {device_of(self)} device type tensor to numpy. Use Tensor.cpu()"
        find("numpy", f"{text} to copy the tensor to host memory first.", TypeError)
    if is_paintable(self):
        messages.check("numpy", [self], [])


def _to_numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    _refused_on_a_gpu(self)
    return _numpy(self, *args, **kwargs)


def _to_array(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    _refused_on_a_gpu(self)
    return _array(self, *args, **kwargs)


def _to_list(self: Tensor) -> Any:
    if is_paintable(self):
        if device_of(self).type == KIND:
            messages.synchronized()
        messages.check("tolist", [self], [])
    return _tolist(self)


def _pin(self: Tensor, device: Any = None) -> Tensor:
    if device_of(self).type == KIND:
        find("pin", "cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned")
    result = self.clone()
    result.untyped_storage().pinned = True
    return result


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == KIND


def install() -> None:
    """Replace torch.Tensor's methods."""
    Tensor.device = property(device_of)
    setattr(Tensor, f"is_{KIND}", property(lambda self: device_of(self).type == KIND))
    Tensor.is_cpu = property(lambda self: device_of(self).type == "cpu")
    Tensor.get_device = lambda self: -1 if device_of(self) == CPU else device_of(self).index
    Tensor.to = to

    def move_to_gpu(
        self: Tensor, device: Any = None, non_blocking: bool = False, **_: Any
    ) -> Tensor:
        return to(self, KIND if device is None else device, non_blocking=non_blocking)

    setattr(Tensor, KIND, move_to_gpu)
    Tensor.cpu = lambda self, memory_format=None: to(self, CPU)
    Tensor.numpy, Tensor.__array__, Tensor.tolist = _to_numpy, _to_array, _to_list
    Tensor.pin_memory = _pin
    Tensor.is_pinned = lambda self, device=None: getattr(self.untyped_storage(), "pinned", False)
    Tensor.record_stream = lambda self, stream: None
    wrap = Tensor._make_wrapper_subclass

    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        if _is_cuda(kwargs.get("device")) and not is_faking():
            kwargs["device"] = CPU
        return wrap(*args, **kwargs)

    Tensor._make_wrapper_subclass = staticmethod(wrapper)
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = resize(self, size)
        update_size(self)
        return result

    torch.UntypedStorage.resize_ = resize_
