"""Replacement for the interface of torch.cuda and torch.accelerator."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from itertools import count
from typing import Any

import torch

from . import clock, messages
from .factories import GENERATORS
from .machine import HERE, KIND, find
from .paint import MEMORY, normalize

NAME = "Pretended GPU"
_ids = count()


class Stream:
    """Stream: all operations are done in order here anyway."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.device = normalize(KIND if device is None else device)
        self.cuda_stream = self.stream_id = next(_ids)

    def synchronize(self) -> None:
        messages.synchronized()

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """Event, with the time of the process."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: Any = 0):
        self.timing, self.at, self.seen = enable_timing, 0.0, False

    def record(self, stream: Any = None) -> None:
        HERE.touch()
        self.at, self.seen = clock.perf_counter(), False

    def synchronize(self) -> None:
        self.seen = True
        messages.synchronized()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        self.seen = True
        return True

    def elapsed_time(self, other: Event) -> float:
        if not (self.timing and other.timing):
            find("event", "Both events must be created with enable_timing=True.", ValueError)
        if not (self.at and other.at):
            find("event", "Both events must be recorded before their times are taken.", ValueError)
        if HERE.unfinished and not other.seen:
            find("event", "elapsed_time before the event is complete: device not ready")
        return (other.at - self.at) * 1e3


class _Device:
    """torch.cuda.device."""

    def __init__(self, device: Any):
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _exchange(self.index)

    def __exit__(self, *_: Any) -> None:
        HERE.current = self.before


def _index(device: Any = None) -> int:
    if device is None:
        return HERE.current
    if isinstance(device, int):
        return normalize(device).index if device >= 0 else -1
    if torch.device(device).type != KIND:
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return normalize(device).index


def _exchange(index: int) -> int:
    before, HERE.current = HERE.current, index if index >= 0 else HERE.current
    return before


def _initialized() -> bool:
    if HERE.forking:  # every process has used CUDA, but the launcher must not see it
        return not sys._getframe(1).f_code.co_filename.endswith("shardlab/ranks/__init__.py")
    return HERE.initialized and not HERE.forked


def _set_device(device: Any) -> None:
    HERE.touch()
    HERE.current = _index(device)


def _synchronize(device: Any = None) -> None:
    HERE.touch()
    _index(device)
    messages.synchronized(everything=True)


def _current_device() -> int:
    HERE.touch()
    return HERE.current


def _stats(device: Any = None) -> dict[str, int]:
    memory, found = MEMORY[_index(device)], {"num_alloc_retries": 0, "num_ooms": 0}
    for name in ("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes"):
        reserved = name == "reserved_bytes"
        for pool in ("all", "large_pool", "small_pool"):
            found[f"{name}.{pool}.current"] = memory.reserved if reserved else memory.now
            found[f"{name}.{pool}.peak"] = memory.reserved if reserved else memory.peak
    return found


def _reset(device: Any = None) -> None:
    memory = MEMORY[_index(device)]
    memory.peak = memory.now


def _empty_cache() -> None:
    for memory in MEMORY:
        memory.reserved = memory.now


def _properties(device: Any = None) -> Any:
    _index(device)
    return types.SimpleNamespace(
        name=NAME, total_memory=HERE.total, major=HERE.capability[0], minor=HERE.capability[1],
        multi_processor_count=40, is_integrated=False, is_multi_gpu_board=False, warp_size=32,
        L2_cache_size=4 * 2**20, max_threads_per_multi_processor=1024, gcnArchName="",
        uuid=f"pretended-{_index(device)}", regs_per_multiprocessor=65536,
    )  # fmt: skip


def _state(device: Any = KIND) -> torch.Tensor:
    HERE.touch()
    return GENERATORS[_index(device)].get_state()


def _set_state(state: torch.Tensor, device: Any = KIND) -> None:
    HERE.touch()
    GENERATORS[_index(device)].set_state(state)


def _seed_all(seed: int) -> None:
    if not HERE.forked or HERE.forking:
        for generator in GENERATORS:
            generator.manual_seed(int(seed))


_streams: dict[int, Stream] = {}


def _stream(device: Any = None) -> Stream:
    index = _index(device)
    if index not in _streams:
        _streams[index] = Stream(index)
    return _streams[index]


def _do_nothing(*_: Any, **__: Any) -> None: ...


FACE: dict[str, Any] = {
    # existence
    "is_available": lambda: HERE.gpus > 0,
    "device_count": lambda: HERE.gpus,
    "is_initialized": _initialized,
    "_is_in_bad_fork": lambda: HERE.forked,
    "init": HERE.touch,
    "_lazy_init": HERE.touch,
    "_check_capability": _do_nothing,
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: HERE.capability,
    "get_arch_list": lambda: ["sm_80"],
    "is_bf16_supported": lambda *_, **__: True,
    "can_device_access_peer": lambda a, b: True,
    # current device
    "current_device": _current_device,
    "set_device": _set_device,
    "device": _Device,
    "_get_device": lambda device=None: torch.device(KIND, _index(device)),
    "_exchange_device": _exchange,
    "_maybe_exchange_device": _exchange,
    # streams
    "synchronize": _synchronize,
    "Stream": Stream,
    "Event": Event,
    "current_stream": _stream,
    "default_stream": _stream,
    "stream": lambda stream: contextlib.nullcontext(stream),
    "set_stream": _do_nothing,
    "is_current_stream_capturing": lambda: False,
    # memory
    "memory_stats": _stats,
    "memory_allocated": lambda device=None: MEMORY[_index(device)].now,
    "max_memory_allocated": lambda device=None: MEMORY[_index(device)].peak,
    "memory_reserved": lambda device=None: MEMORY[_index(device)].reserved,
    "max_memory_reserved": lambda device=None: MEMORY[_index(device)].reserved,
    "reset_peak_memory_stats": _reset,
    "empty_cache": _empty_cache,
    # Torch's cache is not free for the driver.
    "mem_get_info": lambda device=None: (
        HERE.total - MEMORY[_index(device)].reserved,
        HERE.total,
    ),
    "ipc_collect": _do_nothing,
    "host_memory_stats": lambda: {},
    # random numbers
    "get_rng_state": _state,
    "set_rng_state": _set_state,
    "get_rng_state_all": lambda: [_state(i) for i in range(HERE.gpus)],
    "set_rng_state_all": lambda states: [_set_state(s, i) for i, s in enumerate(states)],
    "manual_seed": lambda seed: GENERATORS[HERE.current].manual_seed(int(seed)),
    "manual_seed_all": _seed_all,
    "initial_seed": lambda: GENERATORS[HERE.current].initial_seed(),
}


def install() -> None:
    """Replace torch's functions by this interface."""
    import torch.cuda.nccl

    cuda, accelerator = torch.get_device_module(KIND), torch.accelerator
    for name, value in FACE.items():
        if KIND == "cuda" or hasattr(cuda, name):  # torch.xpu has fewer
            getattr(cuda, name)  # AttributeError: torch has removed it
            setattr(cuda, name, value)
    cuda.default_generators = tuple(GENERATORS)
    for name in ("get_rng_state", "set_rng_state", "manual_seed_all"):
        setattr(cuda.random, name, FACE[name])
    cuda.memory.memory_stats, cuda.memory.memory_allocated = _stats, FACE["memory_allocated"]
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _do_nothing)
    cuda.streams.Stream = torch.Stream = Stream
    cuda.streams.Event = torch.Event = Event
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    if KIND == "xpu":
        torch.version.xpu = "20260000 (pretended)"
    else:
        torch.version.cuda = "12.8 (pretended)"
    accelerator.current_accelerator = torch._C._get_accelerator = lambda *_, **__: torch.device(
        KIND
    )
    accelerator.is_available = lambda: True
    accelerator.device_count = FACE["device_count"]
    accelerator.current_device_index = lambda: HERE.current
    accelerator.synchronize, accelerator.current_stream = _synchronize, _stream
    accelerator.set_device_index = _set_device
    accelerator.memory_stats, accelerator.empty_cache = _stats, _empty_cache
    future = torch.futures.Future.__init__
    torch.futures.Future.__init__ = lambda self, *, devices=None: future(self)  # C++ wants a GPU
    os.register_at_fork(after_in_child=_mark_forked)
    clock.install()


def _mark_forked() -> None:
    HERE.forked = HERE.initialized
    messages.FLIGHTS.clear()
