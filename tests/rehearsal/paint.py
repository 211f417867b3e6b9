"""Paint: the pretended device of a tensor, and the bytes that it would take there.

Three colours: cuda:i; cpu, if requested in Python; and none yet, for tensors made inside C++ from
another tensor's options (autograd's gradients, DDP's buckets). A tensor without a colour takes that
of the other arguments: otherwise, everything that C++ allocates would be a false alarm.

The storage's Python object carries the paint. It lives as long as the storage, so that views,
`.data` and Parameters share it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .machine import HERE, KIND, find

CPU = torch.device("cpu")
_device = Tensor.device  # C's own property, before `cuda.install` replaces it


def get_real_device(t: Tensor) -> torch.device:
    """Return the tensor's device in C++."""
    return _device.__get__(t)


def plain(t: Any) -> bool:
    """Return True for a tensor with memory of its own, not a subclass that wraps others."""
    return isinstance(t, Tensor) and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_paintable(t: Any) -> bool:
    """Return True for a tensor with memory on the real CPU."""
    return plain(t) and get_real_device(t).type == "cpu" and t.layout == torch.strided


def paint_of(t: Tensor) -> torch.device | None:
    """Return cuda:i, cpu, or None; for a wrapper, the paint of its inner tensor."""
    if not plain(t):
        inner = getattr(t, "_local_tensor", None)
        if inner is None and type(t).__name__ == "AsyncCollectiveTensor":
            inner = t.elem
        return get_real_device(t) if inner is None else paint_of(inner)
    if not is_paintable(t):
        return get_real_device(t)
    return getattr(t.untyped_storage(), "paint", None)


def device_of(t: Tensor) -> torch.device:
    """Return the tensor's device, as user code sees it."""
    return paint_of(t) or CPU


def normalize(device: Any) -> torch.device:
    """Normalize a device: add its index."""
    if isinstance(device, int) and not isinstance(device, bool):
        device = torch.device(KIND, device)
    device = torch.device(device)
    if device.type != KIND:
        return device
    index = HERE.current if device.index is None else device.index
    if index >= HERE.gpus:
        text = f"CUDA error: invalid device ordinal ({KIND}:{index} of {HERE.gpus})"
        find("ordinal", text, torch.AcceleratorError)
    return torch.device(KIND, index)


def list_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from list_tensors(value)


# --- memory


class Memory:
    """Bytes on one GPU. Torch keeps freed memory until its cache is emptied."""

    def __init__(self) -> None:
        self.now = self.peak = self.reserved = 0

    def add(self, size: int) -> None:
        """Add `size` bytes, or remove them."""
        self.now += size
        self.peak = max(self.peak, self.now)
        self.reserved = max(self.reserved, self.now)


MEMORY = [Memory() for _ in range(64)]
_sizes: dict[int, tuple[int, int]] = {}  # a storage's address in C++ -> its GPU and its bytes


def reserve(size: int, device: torch.device) -> None:
    """Raise unless `size` bytes more fit on `device`."""
    if device.type == KIND and MEMORY[device.index].now + size > HERE.total:
        free = HERE.total - MEMORY[device.index].now
        text = (
            f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU {device.index} has "
            f"a total capacity of {HERE.total / 2**30:.2f} GiB of which {free / 2**30:.2f} GiB is "
            "free."
        )
        find("memory", text, torch.OutOfMemoryError)


def paint(t: Any, device: torch.device) -> Any:
    """Give `t`, if possible, the colour of `device`; return `t`."""
    if is_paintable(t):
        paint_storage(t.untyped_storage(), device)
    return t


def paint_storage(storage: torch.UntypedStorage, device: torch.device) -> None:
    """Give a storage a colour, and the GPU its bytes."""
    if getattr(storage, "paint", None) == device:
        return
    _forget(storage._cdata)
    if device.type == KIND:
        HERE.touch()
        size = storage.nbytes()
        reserve(size, device)
        MEMORY[device.index].add(size)
        _sizes[storage._cdata] = device.index, size
        weakref.finalize(storage, _forget, storage._cdata).atexit = False
    storage.paint = device


def update_size(storage: torch.UntypedStorage) -> None:
    """Update the bytes of a storage after a resize."""
    if storage._cdata in _sizes:
        index, old = _sizes[storage._cdata]
        MEMORY[index].add(storage.nbytes() - old)
        _sizes[storage._cdata] = index, storage.nbytes()


def _forget(address: int) -> None:
    index, size = _sizes.pop(address, (0, 0))
    MEMORY[index].add(-size)
