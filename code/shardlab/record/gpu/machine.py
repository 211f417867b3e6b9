"""What a machine with a GPU has: devices, memory, links, versions.

`look` asks in a process of its own, so that whoever wants to know holds no memory of a GPU
afterwards. Nothing is changed, only asked.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

OLDEST = (2, 11)  # of PyTorch
_ASK = "from shardlab.record.gpu import machine; machine.answer()"
_PATIENCE = 300  # seconds: a cold machine reads gigabytes of libraries first
GIB = 2**30


def look(environment: Mapping[str, str]) -> dict[str, Any]:
    """What is here. Raises ValueError where there is no GPU that PyTorch can use."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"PyTorch found no GPU here within {_PATIENCE} s") from None
    if done.returncode:
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise ValueError(f"PyTorch cannot say what GPUs are here: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["devices"]:
        raise ValueError(
            f"no CUDA GPU here: {found['why']}; needed are an NVIDIA GPU, its driver, and a "
            "PyTorch with CUDA that sees it (torch.cuda.device_count())"
        )
    broken = [f"GPU {n}: {d['error']}" for n, d in enumerate(found["devices"]) if d["error"]]
    if broken:
        raise ValueError(f"a GPU is here and does not compute: {'; '.join(broken)}")
    return found


def missing(names: Iterable[str]) -> list[str]:
    """Those of the packages `names` that this Python lacks, as pip wants them."""
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    if "torch" in lacking:
        return [f"torch>={OLDEST[0]}.{OLDEST[1]}" if n == "torch" else n for n in lacking]
    if "torch" in names:
        number = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch"))
        if number and tuple(map(int, number.groups())) < OLDEST:
            lacking.append(f"torch>={OLDEST[0]}.{OLDEST[1]}")
    return lacking


def answer() -> None:
    """In the process that is asked: print what is here, as JSON."""
    import torch

    from shardlab.record import facts

    count = torch.cuda.device_count()
    found: dict[str, Any] = {
        "devices": [_device(torch, index) for index in range(count)],
        "why": "" if count else _why(torch),
        "facts": facts.collect(),
    }
    if count:
        found["facts"]["device"] = facts.device([{"device": "cuda"}])
        nccl = _tried(lambda: ".".join(map(str, torch.cuda.nccl.version())), "none")
        found["facts"]["versions"]["nccl"] = nccl
        pairs = itertools.combinations(range(count), 2)
        found["apart"] = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        found["links"] = _links() if count > 1 else ""
    print(json.dumps(found))


def _device(torch: Any, index: int) -> dict[str, Any]:
    """A GPU's name, its bytes, those that are free, and why it does not compute ("": it does)."""
    error, free, total = "", 0, 0
    try:
        free, total = torch.cuda.mem_get_info(index)
        torch.ones(1, device=f"cuda:{index}").add_(1).item()
    except RuntimeError as caught:
        error = str(caught).splitlines()[0]
    name = _tried(lambda: torch.cuda.get_device_name(index), "unknown")
    return {"name": name, "total": total, "free": free, "error": error}


def _why(torch: Any) -> str:
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty, which hides all"
    try:
        torch.cuda.init()
    except Exception as error:  # whatever the driver has to say
        return str(error).splitlines()[0]
    return f"PyTorch {torch.__version__} sees none"


def _tried(ask: Callable[[], str], otherwise: str) -> str:
    with suppress(Exception):  # what is only told must not be what fails
        return ask()
    return otherwise


def _links() -> str:
    """How the GPUs are connected, as the driver's own tool shows it; "" without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    run = subprocess.run
    return _tried(
        lambda: run([tool, "topo", "-m"], capture_output=True, text=True, timeout=60).stdout, ""
    )


def described(found: Mapping[str, Any]) -> str:
    """What `look` found, in a few lines."""
    device, versions = found["facts"]["device"], found["facts"]["versions"]
    lines = [f"{device['count']} × {device['name']}, driver {device['driver'] or 'unknown'}"]
    for index, one in enumerate(found["devices"]):
        held = (one["total"] - one["free"]) / GIB
        lines.append(f"GPU {index}: {one['name']}, {one['total'] / GIB:.1f} GiB")
        if held > 2:  # a context takes half of one
            lines[-1] += f", {held:.1f} of them in use: recordings want the GPU to themselves"
    if len(found["devices"]) > 1:
        apart = ", ".join(f"{a} and {b}" for a, b in found["apart"])
        lines.append(f"links: no direct access between {apart}" if apart else "links: all direct")
        lines += found["links"].rstrip().splitlines()
    lines.append(
        f"Python {versions['python']}, PyTorch {versions['torch']}, "
        f"CUDA {device['cuda'] or 'unknown'}, nccl {versions['nccl']}, {device['cores']} cores"
    )
    return "\n".join(lines)
