"""Rates of this machine, measured in under a minute: `strategy fit` without a file.

Each rate is the median of several timings, with their scatter as its uncertainty. A known GPU's
rates are shares of its data sheet. A CPU has no data sheet, and a GPU may be too new to be known:
then the measured values become the data sheet, of which a job reaches all.

Links between nodes cannot be measured from one node; those rates keep their known values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from shardlab import ranks
from shardlab.common.machines import Machine, find_machine
from shardlab.common.shapes import Config
from shardlab.gpt.model import Block
from shardlab.measure.count import read_clock

from .rates import Rate, Rates, load_rates

REPEATS = 7  # repetitions of each timing, after one to warm up
MIN_SPREAD = 0.02  # relative uncertainty: a machine's timings differ by as much between days


def measure_rates(profile: str = "course") -> Rates:
    """Return a profile's known rates, with those that can be measured on this machine."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each of several ranks on the CPU's cores has
    try:
        measured_values = {
            "products": _measure_matmul(device),
            "attention": _measure_attention(device),
            "memory": _measure_memory(device),
            "launch": _measure_launch(device),
        }
    finally:
        torch.set_num_threads(threads)
    if node := _measure_node_link(on_gpu):
        measured_values["node"] = node
    machine = find_machine(name) or _make_machine(name, measured_values)
    sheet = {
        "products": machine.flops,
        "attention": machine.flops,
        "memory": machine.memory_bandwidth,
        "node": machine.node_bandwidth,
        "launch": 1.0,
    }
    rates = load_rates(profile)
    measured = {
        key: Rate(value / sheet[key], rates.by_name[key].unit, spread, f"measured on this {name}")
        for key, (value, spread) in measured_values.items()
    }
    return Rates(profile, rates.by_name | measured, machine)


def _make_machine(name: str, measured: dict[str, tuple[float, float]]) -> Machine:
    """Return a machine with the measured values as its data sheet."""
    if name == "CPU":
        memory, count = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 1
    else:
        memory = torch.cuda.get_device_properties(0).total_memory
        count = torch.cuda.device_count()
    inside = measured["node"][0] if "node" in measured else measured["memory"][0] / 10
    return Machine(
        name, memory, count, inside, inside, measured["products"][0], measured["memory"][0]
    )  # fmt: skip


def _time_work(
    device: torch.device, amount: float, work: Callable[[], Any], wait: bool = True
) -> tuple[float, float]:
    """Return (rate per second, relative uncertainty) of repeated timings of `work`.

    amount: work per call. wait: time until the GPU is done, not only until launches return.
    """
    now = (lambda: read_clock(device)) if wait else time.monotonic
    taken = []
    for _ in range(REPEATS + 1):
        read_clock(device)  # wait for earlier work
        begin = now()
        work()
        taken.append(now() - begin)
    low, middle, high = quantiles(taken[1:], n=4)
    return amount / median(taken[1:]), max(MIN_SPREAD, (high - low) / middle)


def _measure_matmul(device: torch.device) -> tuple[float, float]:
    n, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return _time_work(device, 2.0 * n**3, lambda: a @ b)


def _measure_attention(device: torch.device) -> tuple[float, float]:
    """Measure fused causal attention, forward: half of the pairs."""
    heads, s, size = (16, 4096, 128) if device.type == "cuda" else (4, 512, 64)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, heads, s, size, device=device).to(dtype) for _ in range(3))
    work = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
    return _time_work(device, 2.0 * s * s * heads * size, work)


def _measure_memory(device: torch.device) -> tuple[float, float]:
    n = 2**29 if device.type == "cuda" else 2**24
    a = torch.randn(n // 4, device=device)
    b = torch.empty_like(a)
    return _time_work(device, 2.0 * n, lambda: torch.add(a, 1.0, out=b))


def _measure_launch(device: torch.device) -> tuple[float, float]:
    """Return the seconds in which the CPU launches a layer, forward and backward.

    The layer is so small that the GPU's work takes no time.
    """
    config = Config(hidden=64, heads=4, mlp="swiglu", norm="rms", bias=False)
    layers = torch.nn.Sequential(*(Block(config) for _ in range(8))).to(device)
    x = torch.randn(1, 8, 64, device=device)
    here = device.type == "cpu"
    rate, spread = _time_work(device, 8.0, lambda: layers(x).sum().backward(), wait=here)
    return 1 / rate, spread


def _measure_node_link(on_gpu: bool) -> tuple[float, float] | None:
    """Measure a rank's bytes per second in an all-reduce of this node's GPUs, or of two processes.

    Returns None on a single GPU.
    """
    size = torch.cuda.device_count() if on_gpu else 2
    return ranks.run(_measure_all_reduce, size, show=False)[0] if size > 1 else None


def _measure_all_reduce() -> tuple[float, float]:
    device, n = ranks.device(), dist.get_world_size()
    size = 2**28 if device.type == "cuda" else 2**22
    x = torch.ones(size // 4, device=device)
    return _time_work(device, 2 * (n - 1) / n * size, lambda: dist.all_reduce(x))
