"""Count the bytes that a process holds.

A storage is the memory behind one tensor or many: views share it. On the CPU `held` tracks every
storage from its allocation in an operation to its release, exact to the byte. On a GPU it reads the
allocator's counters of requested bytes (before rounding up).

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


def tensors_of(*holders: Holder) -> list[Tensor]:
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
            raise ValueError(f"{kind}: allowed are tensors, modules and optimizers")
    return found


def _local(tensor: Tensor) -> Tensor:
    """Return a DTensor's own shard; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind `tensors`; for a DTensor, this rank's."""
    storages = {s._cdata: s.nbytes() for s in (_local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def states(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, gradients, optimizer states, and step counters."""
    parameters = list(module.parameters())
    kept = tensors_of(optimizer)
    return {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(p.grad for p in parameters if p.grad is not None),
        "optimizer": bytes_of(t for t in kept if t.dim()),
        "counters": bytes_of(t for t in kept if not t.dim()),
    }


class Held:
    """Bytes held `now`, and the most (`peak`) since the start or the last `reset_peak()`.

    With trace=True, `trace` is a list of (seconds by time.perf_counter(), bytes held from then on).
    """

    def __init__(self, start: int, trace: bool, limit: float = math.inf):
        self.now = self.peak = start
        self.limit = limit
        self.trace: list[tuple[float, int]] | None = None
        if trace:
            self.trace = [(time.perf_counter(), start)]

    def reset_peak(self) -> None:
        """Set the peak to the bytes that are held now."""
        self.peak = self.now

    def _add(self, size: int) -> None:
        self.now += size
        if size > 0 and self.now > self.limit:
            raise torch.OutOfMemoryError(f"{self.now} bytes held: allowed are {self.limit:.0f}")
        self.peak = max(self.peak, self.now)
        if self.trace is not None:
            self.trace.append((time.perf_counter(), self.now))


class _HeldOnGPU(Held):
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
        self.offset = start - self.now
        self.reset_peak()

    def _stat(self, which: str) -> int:
        gpu.get_device_module().synchronize(self.device)
        stats = gpu.get_device_module().memory_stats(self.device)
        return stats[f"requested_bytes.all.{which}"] + self.offset

    @property
    def now(self) -> int:  # type: ignore[override]
        return self._stat("current")

    @property
    def peak(self) -> int:  # type: ignore[override]
        return self._stat("peak")

    def reset_peak(self) -> None:
        gpu.get_device_module().reset_peak_memory_stats(self.device)


class _Watching(TorchDispatchMode):
    """A dispatch mode that tracks every storage's allocation, resizing and release."""

    def __init__(self, held: Held):
        super().__init__()
        self.held = held
        self.sizes: dict[int, int] = {}  # storage -> bytes counted for it

    def watch(self, tensor: Tensor, count: bool = True) -> None:
        storage = _local(tensor).untyped_storage()
        if storage._cdata not in self.sizes:
            size = storage.nbytes()
            self.sizes[storage._cdata] = size
            # The Python object of a storage lives as long as the storage.
            weakref.finalize(storage, self.forget, storage._cdata).atexit = False
            if count and size:
                self.held._add(size)

    def forget(self, key: int) -> None:
        self.held._add(-self.sizes.pop(key, 0))

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.sizes:
            change = storage.nbytes() - self.sizes[storage._cdata]
            self.sizes[storage._cdata] += change
            self.held._add(change)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
                self.resized(_local(leaf).untyped_storage())  # for aten's resize_ and set_
        return result


@contextmanager
def held(
    *existing: Holder,
    device: torch.device | None = None,
    trace: bool = False,
    limit: float | None = None,
) -> Iterator[Held]:
    """Count the bytes of live storages that are allocated inside or belong to `existing`.

        with count.held(model, optimizer) as held:
            loss(model(tokens), targets).backward()
        held.now, held.peak

    existing: tensors, modules, optimizers from before, counted from the start. device: by default
    that of the first of `existing`, else the CPU. trace: see Held; on the CPU alone. limit: bytes;
    an allocation beyond it raises torch.OutOfMemoryError, on the CPU after the allocation. Raises
    ValueError for trace on a GPU, for a limit that is not above 0, and for anything else in
    `existing`.
    """
    most = math.inf if limit is None else limit
    before = tensors_of(*existing)
    if device is None:
        device = before[0].device if before else torch.device("cpu")
    if gpu.is_gpu(device):
        if trace:
            raise ValueError("trace=True: allowed on the CPU alone; a GPU's allocator keeps none")
        try:
            yield _HeldOnGPU(bytes_of(t for t in before if gpu.is_gpu(t.device)), device, most)
        finally:
            if limit is not None:
                gpu.get_device_module().set_per_process_memory_fraction(1.0, device)
        return
    result = Held(bytes_of(before), trace, most)
    watching = _Watching(result)
    for tensor in before:
        watching.watch(tensor, count=False)
    existing = before = tensor = None  # references here would keep them alive
    plain_resize = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        # FSDP2 and others free a tensor's memory this way, without an operation.
        plain_resize(storage, size)
        watching.resized(storage)
        return storage

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    try:
        with watching:
            yield result
    finally:
        torch.UntypedStorage.resize_ = plain_resize  # type: ignore[method-assign]
        watching.sizes.clear()  # later releases no longer count


class Saved:
    """The activations that forward saves for backward: `bytes` of distinct storages."""

    def __init__(self, excluded: Iterable[Tensor]):
        self.bytes = 0
        self._seen = {_local(t).untyped_storage()._cdata for t in excluded}
        self._kept: list[torch.UntypedStorage] = []  # kept alive, so that no address is reused

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._kept.append(storage)
            self.bytes += storage.nbytes()
        return tensor


@contextmanager
def saved(*excluded: Holder) -> Iterator[Saved]:
    """Count the activations that autograd saves for backward inside the `with` block.

        with count.saved(model, tokens) as saved:
            value = loss(model(tokens), targets)
        saved.bytes

    excluded: tensors that exist anyway: the model with its parameters, the batch. Counted tensors
    stay alive until the block ends. Inputs that torch.utils.checkpoint keeps are not saved by
    autograd: count recomputation with `held`.
    """
    result = Saved(tensors_of(*excluded))
    with torch.autograd.graph.saved_tensors_hooks(result._pack, lambda tensor: tensor):
        yield result
    result._kept.clear()
