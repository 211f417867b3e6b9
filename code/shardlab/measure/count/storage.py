"""Count the bytes that a process holds.

A storage is the memory behind one tensor or many: views share it. On the CPU `track_memory` tracks
every storage from its allocation in an operation to its release, exact to the byte. On a GPU it
reads the allocator's counters of requested bytes (before rounding up).

Not seen on the CPU: memory that a library uses inside one operation, such as gloo's buffers.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo  # the first dispatch mode needs it: once here, not per rank
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlab.common import gpu

Holder = Tensor | nn.Module | torch.optim.Optimizer


def collect_tensors(*holders: Holder) -> list[Tensor]:
    """Return the tensors in modules (parameters, gradients, buffers), optimizers and tensors."""
    found: list[Tensor] = []
    for holder in holders:
        if isinstance(holder, nn.Module):
            parameters = list(holder.parameters())
            found += [*parameters, *holder.buffers()]
            found += [p.grad for p in parameters if p.grad is not None]
        elif isinstance(holder, torch.optim.Optimizer):
            found += [v for v in tree_leaves(list(holder.state.values())) if isinstance(v, Tensor)]
        elif isinstance(holder, Tensor):
            found += (
                [holder] if holder.grad is None or not holder.is_leaf else [holder, holder.grad]
            )
        else:
            kind = type(holder).__name__
            raise ValueError(f"{kind}: must be a tensor, a module or an optimizer")
    return found


def _get_storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of a DTensor's local shard."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def sum_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind `tensors`; for a DTensor, this rank's."""
    storages = (_get_storage(tensor) for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def measure_state_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, gradients, optimizer states, and step counters."""
    parameters = list(module.parameters())
    kept = collect_tensors(optimizer)
    return {
        "parameters": sum_bytes(parameters),
        "gradients": sum_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer": sum_bytes(t for t in kept if t.dim()),
        "counters": sum_bytes(t for t in kept if not t.dim()),
    }


class MemoryTracker:
    """The bytes held now, and their peak since the start or the last `reset_peak()`.

    With trace=True, `trace` is a list of (seconds by time.perf_counter(), bytes held from then on).
    """

    def __init__(self, start: int, trace: bool, limit: float = math.inf):
        self.current_bytes = self.peak_bytes = start
        self.limit = limit
        self.trace: list[tuple[float, int]] | None = None
        if trace:
            self.trace = [(time.perf_counter(), start)]

    def reset_peak(self) -> None:
        """Set the peak to the bytes that are held now."""
        self.peak_bytes = self.current_bytes

    def _add_bytes(self, size: int) -> None:
        self.current_bytes += size
        if size > 0 and self.current_bytes > self.limit:
            words = f"{self.current_bytes} bytes held: must be at most {self.limit:.0f}"
            raise torch.OutOfMemoryError(words)
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        if self.trace is not None:
            self.trace.append((time.perf_counter(), self.current_bytes))


class _GPUMemoryTracker(MemoryTracker):
    """Bytes held on a GPU, read from this process's allocator, which also enforces the limit."""

    def __init__(self, start: int, device: torch.device, limit: float = math.inf):
        self.device = device
        if limit < math.inf:
            total = gpu.get_device_module().get_device_properties(device).total_memory
            most = (gpu.get_device_module().memory_reserved(device) + limit - start) / total
            gpu.get_device_module().set_per_process_memory_fraction(
                min(1.0, max(0.0, most)), device
            )
        self.trace = None
        self.offset = 0
        self.offset = start - self.current_bytes
        self.reset_peak()

    def _read_stat(self, which: str) -> int:
        gpu.get_device_module().synchronize(self.device)
        stats = gpu.get_device_module().memory_stats(self.device)
        return stats[f"requested_bytes.all.{which}"] + self.offset

    @property
    def current_bytes(self) -> int:  # type: ignore[override]
        return self._read_stat("current")

    @property
    def peak_bytes(self) -> int:  # type: ignore[override]
        return self._read_stat("peak")

    def reset_peak(self) -> None:
        gpu.get_device_module().reset_peak_memory_stats(self.device)


class _StorageMode(TorchDispatchMode):
    """A dispatch mode that tracks every storage's allocation, resizing and release."""

    def __init__(self, tracker: MemoryTracker):
        super().__init__()
        self.tracker = tracker
        self.sizes: dict[int, int] = {}  # storage -> bytes counted for it

    def track_storage(self, storage: torch.UntypedStorage, count: bool = True) -> None:
        if storage._cdata not in self.sizes:
            size = storage.nbytes()
            self.sizes[storage._cdata] = size
            # The Python object of a storage lives as long as the storage.
            weakref.finalize(storage, self.untrack_storage, storage._cdata).atexit = False
            if count and size:
                self.tracker._add_bytes(size)

    def untrack_storage(self, key: int) -> None:
        self.tracker._add_bytes(-self.sizes.pop(key, 0))

    def update_size(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.sizes:
            change = storage.nbytes() - self.sizes[storage._cdata]
            self.sizes[storage._cdata] += change
            self.tracker._add_bytes(change)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.track_storage(storage := _get_storage(leaf))
                self.update_size(storage)  # for aten's resize_ and set_
        return result


@contextmanager
def track_memory(
    *existing: Holder,
    device: torch.device | None = None,
    trace: bool = False,
    limit: float | None = None,
) -> Iterator[MemoryTracker]:
    """Count the bytes of live storages that are allocated inside or belong to `existing`.

        with count.track_memory(model, optimizer) as tracker:
            loss(model(tokens), targets).backward()
        tracker.current_bytes, tracker.peak_bytes

    existing: tensors, modules, optimizers from before, counted from the start. device: by default
    that of the first of `existing`, else the CPU. trace: see MemoryTracker; only on the CPU. limit:
    bytes; an allocation beyond it raises torch.OutOfMemoryError, on the CPU after the allocation.
    Raises ValueError for trace on a GPU, and for anything else in `existing`.
    """
    max_bytes = math.inf if limit is None else limit
    before = collect_tensors(*existing)
    if device is None:
        device = before[0].device if before else torch.device("cpu")
    if gpu.is_gpu(device):
        if trace:
            raise ValueError("trace=True: must be False on a GPU, whose allocator keeps no trace")
        try:
            start = sum_bytes(t for t in before if gpu.is_gpu(t.device))
            yield _GPUMemoryTracker(start, device, max_bytes)
        finally:
            if limit is not None:
                gpu.get_device_module().set_per_process_memory_fraction(1.0, device)
        return
    result = MemoryTracker(sum_bytes(before), trace, max_bytes)
    mode = _StorageMode(result)
    for tensor in before:
        mode.track_storage(_get_storage(tensor), count=False)
    existing = before = tensor = None  # references here would keep them alive
    plain_resize = torch.UntypedStorage.resize_

    def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        # FSDP2 and others free a tensor's memory this way, without an operation.
        plain_resize(storage, size)
        mode.update_size(storage)
        return storage

    torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign]
    try:
        with mode:
            yield result
    finally:
        torch.UntypedStorage.resize_ = plain_resize  # type: ignore[method-assign]
        mode.sizes.clear()  # later releases no longer count


class SavedActivations:
    """The activations that forward saves for backward: `bytes` of distinct storages."""

    def __init__(self, excluded: Iterable[Tensor]):
        self.bytes = 0
        self._seen = {_get_storage(t)._cdata for t in excluded}
        self._kept: list[torch.UntypedStorage] = []  # kept alive, so that no address is reused

    def _count_storage(self, tensor: Tensor) -> Tensor:
        storage = _get_storage(tensor)
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._kept.append(storage)
            self.bytes += storage.nbytes()
        return tensor


@contextmanager
def track_saved_activations(*excluded: Holder) -> Iterator[SavedActivations]:
    """Count the activations that autograd saves for backward inside the `with` block.

        with count.track_saved_activations(model, tokens) as saved:
            value = loss(model(tokens), targets)
        saved.bytes

    excluded: tensors that exist anyway: the model with its parameters, the batch. Counted tensors
    stay alive until the block ends. Inputs that torch.utils.checkpoint keeps are not saved by
    autograd: count recomputation with `track_memory`.
    """
    result = SavedActivations(collect_tensors(*excluded))
    with torch.autograd.graph.saved_tensors_hooks(result._count_storage, lambda tensor: tensor):
        yield result
    result._kept.clear()
