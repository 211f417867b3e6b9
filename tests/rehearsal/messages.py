"""Tensors in flight: buffers that a group reads or writes until a wait, and asynchronous copies.

Conflicts are found by byte ranges: rings send one slice of a buffer while they receive another.

nccl's `wait()` stops the stream and not the process. So does this one, although gloo works in the
buffers themselves: a thread waits for gloo, and the process goes on until the host reads a value,
or an operator touches the buffer.
"""

from __future__ import annotations

import _thread
import functools
import threading
import types
import weakref
from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from . import connections
from .machine import CARRIER, HERE, KIND, find, host_waits, place, report_fault
from .paint import CPU, device_of, is_paintable, list_tensors, paint_of

Span = tuple[int, int, int]  # storage, first byte, byte after the last


def _list_spans(tensors: Iterable[Tensor]) -> list[Span]:
    found = []
    for t in tensors:
        if is_paintable(t) and t.numel():
            size = t.element_size()
            first = t.storage_offset() * size
            steps = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            found.append((t.untyped_storage()._cdata, first, first + (steps + 1) * size))
    return found


def _overlap(some: list[Span], others: list[Span]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)


class Flight:
    """Memory in use by an operation that the host has started and not waited for."""

    def __init__(self, what: str, reads: list[Tensor], writes: list[Tensor], work: Any = None):
        self.what, self.place = what, place()
        self.reads, self.writes = _list_spans(reads), _list_spans(writes)
        # Keeps the buffers, so that no address is reused; and gloo drops works without references.
        self.kept = [t.untyped_storage() for t in (*reads, *writes)], work
        self.work, self.nccl = work, False
        self.over: threading.Event | None = None  # once somebody waited: set when it is over
        self.error: Exception | None = None
        self.key = id(work) if work is not None else next(_copies)
        FLIGHTS[self.key] = self

    def conflict(self, reads: list[Span], writes: list[Span]) -> str:
        """Return the error in using these tensors meanwhile."""
        if _overlap(reads, self.writes):
            return f"reads what {self.what} (started at {self.place}) writes"
        if _overlap(writes, self.writes):
            return f"overwrites what {self.what} (started at {self.place}) writes"
        if _overlap(writes, self.reads):
            return f"overwrites what {self.what} (started at {self.place}) still reads"
        return ""

    def order(self, wait: Any) -> None:
        """Do nccl's wait(): the stream waits, and the process goes on."""
        if self.over is None:
            self.over = threading.Event()
            _thread.start_new_thread(self._finish, (wait, self.over))

    def _finish(self, wait: Any, over: threading.Event) -> None:
        try:
            wait(self.work)
            _over.add(self.work)
            FLIGHTS.pop(self.key, None)
        except Exception as error:  # raised by the next use of the buffer
            self.error = error
        over.set()

    def join(self) -> None:
        """Block until the operation is over."""
        assert self.over is not None
        self.over.wait()
        if self.error is not None:
            raise self.error


FLIGHTS: dict[Any, Flight] = {}
_copies = (("copy", n) for n in count())
_over: weakref.WeakSet[Any] = weakref.WeakSet()  # nccl's works; gloo waits for ever a second time


def check(
    what: str, reads: Iterable[Tensor], writes: Iterable[Tensor], in_stream: bool = False
) -> None:
    """Check that `what` may use these tensors now, or in the stream, after all earlier copies."""
    if not FLIGHTS:
        return
    read, written = _list_spans(reads), _list_spans(writes)
    for flight in list(FLIGHTS.values()):
        if in_stream and flight.work is None:
            continue
        conflict = flight.conflict(read, written)
        if conflict and flight.over is not None:
            flight.join()  # the stream has waited for it
        elif conflict:
            report_fault("race", f"{what} {conflict}: no wait() before")


def begin_copy(target: Tensor, source: Tensor, free: bool, to: torch.device | None = None) -> None:
    """Begin a copy; `free`: non_blocking, which is asynchronous from pinned memory."""
    source_at, target_at = paint_of(source), to or paint_of(target)
    if source_at is None or target_at is None or source_at.type == target_at.type:
        return
    here, there = source_at.type, target_at.type
    host = source if here == "cpu" else target
    pinned = getattr(host.untyped_storage(), "pinned", False)
    if not free or (there == "cpu" and not pinned):
        synchronized()
    elif pinned and there == "cpu":
        Flight("the copy to the CPU (non_blocking)", [], [target])
    elif pinned:
        Flight("the copy to the GPU (non_blocking)", [source], [])


def synchronized(everything: bool = False) -> None:
    """Record that the host waits for the current stream, or for all streams."""
    host_waits()
    for flight in list(FLIGHTS.values()):
        if flight.work is None:
            FLIGHTS.pop(flight.key, None)
        elif flight.over is not None or (everything and flight.nccl and flight.what in IN_PLACE):
            flight.order(_wait)
            flight.join()
    HERE.unfinished = 0


# --- groups

# Of CUDA tensors, gloo takes these; for the others it would read a pointer of the GPU.
GLOO_TAKES = {
    "broadcast", "allreduce", "reduce", "allgather", "_allgather_base", "gather", "scatter",
    "alltoall_base", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "barrier",
    "allgather_into_tensor_coalesced", "all_gather_single", "reduce_scatter_single",
    "all_to_all_single",
}  # fmt: skip
OUTPUT_FIRST = (
    "allgather", "_allgather", "all_gather", "reduce_scatter", "_reduce_scatter", "alltoall",
    "all_to_all", "gather", "scatter",
)  # fmt: skip
NCCL_TYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2,
}  # fmt: skip
# Of the others, gloo copies the result at the end: autograd would take that for a change.
IN_PLACE = {
    "broadcast",
    "allreduce",
    "reduce",
    "alltoall_base",
    "all_to_all_single",
    "send",
    "recv",
}
METHODS = [
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base",
    "gather", "scatter", "allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "alltoall", "reduce_scatter_tensor_coalesced", "alltoall_base", "send",
    "recv", "recv_anysource", "all_gather_single", "reduce_scatter_single", "all_to_all_single",
    "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
]  # fmt: skip


def _carrier(group: Any, name: str, tensors: list[Tensor]) -> str:
    """Return the backend for these tensors; raise the error that it would raise."""
    backends = connections.backends(group)
    devices = {device_of(t) for t in tensors}
    if len(devices) > 1:
        find("group", f"{name}: tensors on {', '.join(sorted(map(str, devices)))}")
    device = devices.pop()
    if not backends:
        return ""  # not one of torch's groups: the group that it uses reports
    backend = backends.get(device.type)
    if backend is None:
        find("group", f"{name}: No backend type associated with device type {device.type}")
    takes = GLOO_TAKES if KIND == "cuda" else ()  # gloo knows no other GPUs
    if backend == "gloo" and device.type == KIND and name not in takes:
        find("group", f"{name} of a tensor on {device}: gloo takes the host's memory alone here")
    if backend == CARRIER:
        for t in tensors:
            if not t.is_contiguous():
                text = f"{name}: Tensors must be contiguous (strides {t.stride()})"
                find("group", text, ValueError)
            if t.dtype not in NCCL_TYPES:
                find("group", f"{name}: data type is not supported: {t.dtype}", TypeError)
        if device.index != HERE.current:
            text = f"{name}: a tensor on {device}, and this rank's current device is"
            report_fault("group", f"{text} {device.type}:{HERE.current}")
        if name == "recv_anysource":
            find("group", "ProcessGroupNCCL does not support recv from any source")
    return backend


def _split_sides(name: str, args: Iterable[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a group's method reads, and those that it writes."""
    given = [tensors for tensors in (list(list_tensors([a])) for a in args) if tensors]
    first, second = [*given, [], []][:2]
    if name == "send":
        return first, []
    if name.startswith("recv"):
        return [], first
    return (second, first) if name.startswith(OUTPUT_FIRST) else (first, first)


def _watch_method(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        reads, writes = _split_sides(name, (*args, *kwargs.values()))
        used = [t for t in (*reads, *writes) if is_paintable(t)]
        if not used:
            return original(self, *args, **kwargs)
        backend = _carrier(self, name, used)
        check(name, reads, writes)
        if backend == CARRIER:
            connections.make_connections(self, name, args, kwargs)
        work = original(self, *args, **kwargs)
        if work is not None and backend != "fake":  # "fake" moves no data
            if any(device_of(t) != CPU for t in used):
                HERE.launch()
            Flight(name, reads, writes, work).nccl = backend == CARRIER
        return work

    return call


def _wait(work: Any, *args: Any, **kwargs: Any) -> bool:
    raise NotImplementedError  # `install` puts gloo's here


def install() -> None:
    """Replace the methods of torch's groups and works; give torch an nccl that is gloo."""
    import torch.distributed as dist

    global _wait
    c10d, C = dist.distributed_c10d, torch._C._distributed_c10d
    for name in METHODS:
        if hasattr(C.ProcessGroup, name):
            setattr(C.ProcessGroup, name, _watch_method(name, getattr(C.ProcessGroup, name)))
    _wait = C.Work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> bool:
        flight = FLIGHTS.get(id(self))
        if flight is None:
            return True if self in _over else _wait(self, *args, **kwargs)
        if flight.nccl and flight.what in IN_PLACE:
            flight.order(_wait)
            return True
        del FLIGHTS[flight.key]  # first: gloo's reduce-scatter copies its result during the wait
        return _wait(self, *args, **kwargs)

    C.Work.wait = wait

    class ProcessGroupNCCL(C.ProcessGroupGloo):
        class Options:
            def __init__(self, is_high_priority_stream: bool = False):
                self.is_high_priority_stream = is_high_priority_stream
                self.config = types.SimpleNamespace()

        def __init__(self, store: Any, rank: int, size: int, options: Any):
            HERE.touch()
            super().__init__(store, rank, size, timeout=options._timeout)

    name, there = f"ProcessGroup{CARRIER.upper()}", f"_{CARRIER.upper()}_AVAILABLE"
    setattr(c10d, name, ProcessGroupNCCL)
    setattr(dist, name, ProcessGroupNCCL)
    assert not getattr(c10d, there), "the rehearsal wants a torch without GPUs"
    setattr(c10d, there, True)
    register = C.ProcessGroup._register_backend

    def register_watched(self: Any, device: torch.device, kind: Any, backend: Any = None) -> None:
        register(self, device, kind, backend)
        if device.type == KIND and isinstance(backend, ProcessGroupNCCL):
            try:
                self._get_backend(CPU)
            except RuntimeError:  # of nccl alone; C++ sees tensors on the CPU
                register(self, CPU, kind, backend)

    C.ProcessGroup._register_backend = register_watched
    connections.install()
