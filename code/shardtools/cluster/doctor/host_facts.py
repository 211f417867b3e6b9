"""Facts about the host of one rank, which `checks` judges.

Each function returns plain values for JSON, in bytes, seconds and their ratios; None: no limit.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from shardlab.common import PACKAGES
from shardlab.measure.count import read_clock
from shardlab.measure.count.speed import get_processor_name

Facts = dict[str, Any]
PREFIXES = "NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_FR_", "TORCH_DISTRIBUTED_"


def read_versions(device: torch.device) -> Facts:
    """Return the versions that have to be equal on all ranks."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        toolkit = "hip" if torch.version.hip else "cuda"  # AMD's GPUs are "cuda" to torch, too
        found[toolkit] = torch.version.hip or torch.version.cuda or ""
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    code, digest = Path(__file__).parents[3], hashlib.sha256()  # identifies the course's version
    for path in sorted(path for name in PACKAGES for path in (code / name).rglob("*.py")):
        digest.update(f"{path.relative_to(code)}\0".encode() + path.read_bytes())
    return found | {"shardlab": digest.hexdigest()[:12]}


def read_environment() -> Facts:
    """Return the environment variables that nccl, gloo and torch's groups read."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIXES)}


def describe_device(device: torch.device) -> Facts:
    """Return kind, name and id of this rank's device. A GPU has the same id in all processes."""
    if device.type != "cuda":
        return {"kind": "cpu", "name": get_processor_name(), "id": None}
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    own = {"kind": "cuda", "name": properties.name, "id": str(properties.uuid)}
    return own | {"free": free, "total": total}


def read_cores() -> Facts:
    """Return the cores that this process may use, their total number, and torch's threads."""
    total = os.cpu_count() or 1
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(total)
    return {"mask": sorted(mask), "all": total, "threads": torch.get_num_threads()}


def read_free_memory() -> Facts:
    """Return the free bytes of the host's memory, and of /dev/shm if the host has it."""
    found = {"memory": psutil.virtual_memory().available}
    if os.path.isdir("/dev/shm"):
        found["/dev/shm"] = psutil.disk_usage("/dev/shm").free
    return found


def read_limits() -> Facts:
    """Return the limits of `ulimit`: the soft limit, and how far this user may raise it."""
    found: Facts = {"infiniband": any(Path("/sys/class/infiniband").glob("*"))}
    for name in ("nofile", "nproc", "memlock"):
        both = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        found[name] = [None if value == resource.RLIM_INFINITY else value for value in both]
    return found


def read_network() -> Facts:
    """Return faults of the network interface that gloo chooses for this rank.

    `loopback`: the interface's address, if it is the loopback address. `unresolved`: the name of
    this host, if the name has no address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    interfaces = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    address, unresolved = "", socket.gethostname()
    with suppress(OSError):
        address, unresolved = socket.gethostbyname(unresolved), ""
    if interface:  # else gloo's own rule: the address of the host's name
        address = (interfaces.get(interface) or [""])[-1]
    loopback = address if address.startswith("127.") else ""  # Debian gives the name 127.0.1.1
    fault = ""
    if not loopback and not any(address in own for own in interfaces.values()):
        what = f"GLOO_SOCKET_IFNAME={interface}" if interface else "the host's name"
        fault = f"{what} is no interface of this host; there are {', '.join(sorted(interfaces))}"
    return {"fault": fault, "loopback": loopback, "unresolved": unresolved}


def measure_speed(device: torch.device, windows: int = 5) -> Facts:
    """Return the FLOP/s of matrix products: the best of several windows of 0.05 s (GPU: 0.2 s).

    On the CPU: FLOP/s of one core, per second of this thread's CPU time.
    """
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.float16) if cuda else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    best = 0.0
    for _ in range(windows):
        begin, core_begin, done, passed = read_clock(device), time.thread_time(), 0, 0.0
        while passed < (0.2 if cuda else 0.05):
            for _ in range(4):
                torch.mm(a, b)  # [size, size] @ [size, size]
            done += 4
            passed = read_clock(device) - begin
        seconds = passed if cuda else time.thread_time() - core_begin
        best = max(best, 2 * size**3 * done / seconds)
    return {"kind": device.type, "name": describe_device(device)["name"], "flops": best}
