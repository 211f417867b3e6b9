"""The hardware of this machine, and the rates it reaches: the two sides of a roofline."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from shardlab.common import gpu
from shardlab.common.arguments import check_number


def describe_machine() -> list[tuple[str, str]]:
    """Return this process's hardware as (name, value): each GPU, or the processor without one."""
    facts: list[tuple[str, str]] = []
    for index in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(index)
        facts.append(("GPU", one.name))
        facts.append(("memory", f"{one.total_memory / 1e9:.1f} GB"))
        # Not every version of torch has these two. DDR: two transfers per cycle.
        clock, width = (getattr(one, n, 0) for n in ("memory_clock_rate", "memory_bus_width"))
        if clock and width:
            facts.append(("memory bandwidth", f"{2e3 * clock * width / 8 / 1e9:.0f} GB/s"))
        facts.append(("compute capability", f"{one.major}.{one.minor}"))
        facts.append(("multiprocessors", str(one.multi_processor_count)))
    if facts:
        return facts
    return [
        ("GPU", "none"),
        ("processor", get_processor_name()),
        ("cores", str(os.cpu_count())),
        ("memory", f"{psutil.virtual_memory().total / 1e9:.1f} GB"),
        ("vector instructions", torch.backends.cpu.get_cpu_capability()),
    ]


def get_processor_name() -> str:
    """Return the processor's name, from Linux or else from Python."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Rates:
    """The rates that a machine reaches: `flops` in FLOP/s, memory `bytes` in bytes/s."""

    flops: float
    bytes: float

    def __post_init__(self) -> None:
        check_number(flops=self.flops, bytes=self.bytes)

    @property
    def ridge_point(self) -> float:
        """FLOP per byte above which compute is the limit, and below which memory is."""
        return self.flops / self.bytes

    def get_attainable_flops(self, intensity: float) -> float:
        """Return the FLOP/s that work of `intensity` FLOP per byte can reach.

        Williams et al., "Roofline", CACM 52(4), 2009.
        """
        return min(self.flops, intensity * self.bytes)


def read_clock(device: torch.device) -> float:
    """Return time.perf_counter() in seconds, after all work of `device` is done.

    A GPU runs asynchronously: without the wait, only the launches would be timed.
    """
    if gpu.is_gpu(device):
        gpu.get_device_module().synchronize(device)
    return time.perf_counter()


def measure_seconds(work: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Return the shortest time of `work` in seconds, after one warm-up call."""
    work()
    best = float("inf")
    for _ in range(repeats):
        begin = read_clock(device)
        work()
        best = min(best, read_clock(device) - begin)
    return best


def measure_rates(dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Rates:
    """Measure a large square matrix product, and a copy larger than any cache, on `device`.

    Takes a fraction of a second on two cores. Returns the best of five: the machine's capability.
    """
    device = device or torch.device("cpu")
    side, size = (8192, 2**30) if gpu.is_gpu(device) else (1024, 2**27)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    product = measure_seconds(lambda: a @ b, device)  # [side, side] @ [side, side]
    copy = measure_seconds(lambda: target.copy_(source), device)
    return Rates(2 * side**3 / product, 2 * size / copy)  # a copy reads and writes
