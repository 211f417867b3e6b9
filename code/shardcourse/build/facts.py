"""Facts about the machine of a process, sent to a kernel as source text after the last cell.

The module imports nothing of the course, and uses torch only if the cells have imported it: a
recording names a GPU only if its own process used one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from typing import Any


def get_cpu_name() -> str:
    """Return the processor's name, "" where the system does not report it."""
    with suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line.partition(":")[2].strip() for line in file if "model name" in line)
    return platform.processor()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def get_driver_version() -> str:
    """Return the NVIDIA driver's version, "" without one."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def get_versions() -> dict[str, str]:
    """Return the installed versions of Python, torch, DeepSpeed and the course.

    torch's own `__version__` may have a label that its distribution lacks (2.13.0+cu130 and
    2.13.0), and not every page imports torch: `__version__` is used only without a distribution.
    """
    found = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "shardlab"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if version := getattr(sys.modules.get(name), "__version__", ""):
                found[name] = str(version)
    return found


def get_device(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the device that the cells and their ranks used."""
    torch = sys.modules.get("torch")
    used = any(entry["device"] == "cuda" for entry in ranks)
    if torch is None or not (used or torch.cuda.is_initialized()):
        return {"kind": "cpu", "name": get_cpu_name(), "count": 1, "cores": count_cores()}
    count = torch.cuda.device_count()
    hip = getattr(torch.version, "hip", None)  # AMD GPUs have the device type "cuda", too
    names = {torch.cuda.get_device_name(index): None for index in range(count)}
    return {
        "kind": "cuda",
        "name": ", ".join(names),
        "count": count,
        "driver": get_driver_version(),
        "cuda": torch.version.cuda or "",
        **({"hip": hip} if hip else {}),
        "cores": count_cores(),
    }


def collect_facts() -> dict[str, Any]:
    """Return the device, versions and runs of ranks that a recording stores."""
    run_counts = getattr(sys.modules.get("shardlab.ranks"), "run_counts", {})
    ranks = [
        {"ranks": size, "backend": backend, "device": kind, "runs": runs}
        for (backend, kind, size), runs in sorted(run_counts.items())
    ]
    return {"device": get_device(ranks), "versions": get_versions(), "ranks": ranks}


if __name__ == "__main__":
    print(json.dumps(collect_facts()))
