"""A limit to what a process may take of its device's memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardlab.arguments import check_number


@contextmanager
def limited(size: float, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, this process gets `size` bytes more of the memory of `device`, and no more than that.

    What asks for more raises: torch.OutOfMemoryError on a GPU, RuntimeError on the CPU, where the
    system counts all data of the process (RLIMIT_DATA, Linux alone), and not only tensors.
    Raises ValueError for a size that is not above 0, OSError where there is no such limit.
    """
    check_number(size=size)
    device = torch.device(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = (torch.cuda.memory_reserved(device) + size) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} limits no process's data; Linux does")
    with open("/proc/self/status") as status:
        taken = next(int(line.split()[1]) for line in status if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * taken + int(size), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
