"""What one rank finds on its own host: facts, no verdicts (`doctor` judges them).

Each part is a function, which returns plain values for JSON. Bytes, seconds and bytes per second;
None where the system does not say, or for a limit that there is not.
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
from shardlab.measure.count import clock
from shardlab.measure.count.speed import processor

Facts = dict[str, Any]
LIMITS = ("nofile", "nproc", "memlock", "core")
VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_FR_", "TORCH_DISTRIBUTED_")


def host() -> str:
    """The name of this rank's host: ranks of one name share its memory, cores and clock."""
    return socket.gethostname()


def versions(device: torch.device) -> Facts:
    """Of what has to be equal on all ranks."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        toolkit = "hip" if torch.version.hip else "cuda"  # AMD's GPUs are "cuda" to torch, too
        found[toolkit] = torch.version.hip or torch.version.cuda or ""
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _driver()
    return found | {"shardlab": sources()}


def sources() -> str:
    """A short hash of the course's own files: two checkouts are seldom the same."""
    code = Path(__file__).parents[3]
    digest = hashlib.sha256()
    for path in sorted(path for name in PACKAGES for path in (code / name).rglob("*.py")):
        digest.update(f"{path.relative_to(code)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def environment() -> Facts:
    """What is set in this rank's environment for nccl and gloo, and for torch's groups of them."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)}


def gpu(device: torch.device) -> Facts:
    """This rank's device. A GPU's `id` is its own, whatever number it has in this process."""
    if device.type != "cuda":
        return {"kind": "cpu", "name": processor(), "id": None, "free": None, "total": None}
    free, total = torch.cuda.mem_get_info(device)
    about = torch.cuda.get_device_properties(device)
    return {
        "kind": "cuda",
        "name": about.name,
        "id": str(about.uuid),
        "number": device.index,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "free": free,
        "total": total,
    }


def cores() -> Facts:
    """The cores that this process may use, how many there are, and its threads for products."""
    mask = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {"mask": mask, "all": os.cpu_count() or 1, "threads": torch.get_num_threads()}


def memory() -> Facts:
    """The host's memory that is left for this process, and all of it."""
    host = psutil.virtual_memory()
    return {"free": min(host.available, *_group_rooms(), host.total), "total": host.total}


def _group_rooms() -> list[int]:
    """What the control groups leave that this process is in: a job's own limit is one of them."""
    rooms = []
    with suppress(OSError, ValueError, IndexError):
        own = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1].partition("::/")[2]
        group = Path("/sys/fs/cgroup", own)
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # "max": no limit
                most = int((folder / "memory.max").read_text())
                rooms.append(max(0, most - int((folder / "memory.current").read_text())))
    return rooms


def limits() -> Facts:
    """What `ulimit` says: the soft limit, and how far this user may raise it."""
    found: Facts = {"infiniband": any(Path("/sys/class/infiniband").glob("*"))}
    for name in LIMITS:
        both = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        found[name] = [None if value == resource.RLIM_INFINITY else value for value in both]
    return found


def shared_memory() -> Facts | None:
    """/dev/shm, through which processes of one host hand tensors to one another."""
    if not Path("/dev/shm").is_dir():
        return None
    usage = psutil.disk_usage("/dev/shm")
    return {"free": usage.free, "total": usage.total}


def network() -> Facts:
    """The interface by which this rank talks: what gloo and nccl would take, and how fast it is."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    there = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    found: Facts = {"named": named, "interfaces": sorted(there), "interface": None, "address": None}
    addresses, found["unresolved"] = [], host()
    with suppress(OSError):
        addresses, found["unresolved"] = [socket.gethostbyname(host())], ""
    if named:  # else gloo's own rule: the address of the host's name
        addresses = there.get(named, [])
    for address in addresses:
        holders = [name for name, its in there.items() if address in its]
        inside = address.startswith("127.")  # Debian gives the host's name 127.0.1.1
        found |= {"address": address, "interface": holders[0] if holders else None}
        found["loopback"] = inside
    speed = psutil.net_if_stats().get(found["interface"] or "")
    found["speed"] = speed.speed * 1e6 / 8 if speed and speed.speed else None
    return found


def speed(device: torch.device, windows: int = 5) -> Facts:
    """FLOP/s of products one after another: the best of some windows of 0.05 s (a GPU: 0.2 s).

    On the CPU: of one core, in seconds that this thread had it; `fraction` says how often it had.
    """
    cuda = device.type == "cuda"
    side, few, dtype = (8192, 4, torch.float16) if cuda else (256, 4, torch.float32)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    name = torch.cuda.get_device_name(device) if cuda else processor()
    found: Facts = {"kind": device.type, "name": name, "flops": 0.0, "fraction": 0.0}
    for _ in range(windows):
        begin, core, done, passed = clock(device), time.thread_time(), 0, 0.0
        while passed < (0.2 if cuda else 0.05):
            for _ in range(few):
                torch.mm(a, b)  # [side, side] @ [side, side]
            done += few
            passed = clock(device) - begin
        had = time.thread_time() - core
        flops, fraction = 2 * side**3 * done / (passed if cuda else had), had / passed
        found |= {"flops": max(found["flops"], flops), "fraction": max(found["fraction"], fraction)}
    return found


def now() -> float:
    """This host's clock, seconds of the epoch."""
    return time.time()


def _driver() -> str:
    """The version of NVIDIA's driver, or of AMD's; "" where Linux does not tell."""
    for module in ("nvidia", "amdgpu"):
        with suppress(OSError):
            return Path(f"/sys/module/{module}/version").read_text("utf-8").strip()
    return ""
