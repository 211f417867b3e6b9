"""What a machine with a GPU has: devices, memory, versions; and what its Python lacks.

`look` asks in a process of its own, so that whoever wants to know holds no memory of a GPU
afterwards. How GPUs are connected, and how fast, `python -m shardlab doctor` measures.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

OLDEST = (2, 11)  # of PyTorch
_ASK = "from shardcourse.build.gpu import machine; machine.answer()"
_PATIENCE = 300  # seconds: a cold machine reads gigabytes of libraries first
GIB = 2**30
# Where a log says what went wrong: pytest's summary, `record`'s message, the end of a traceback.
_TELLS = re.compile(
    r"(?m)^(?:(?:FAILED|ERROR) .*|lessons/\w+\.md, code cell .*|[\w.]*(?:Error|Interrupt)\b.*)$"
)


def look(environment: Mapping[str, str]) -> dict[str, Any]:
    """What is here. Raises ValueError where there is no GPU that PyTorch can use."""
    command = [sys.executable, "-c", _ASK]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"PyTorch found no GPU here within {_PATIENCE} s") from None
    if done.returncode:
        raise ValueError(
            f"no CUDA GPU here that computes: {reason(done.stderr)}; needed are an NVIDIA GPU, its "
            "driver, and a PyTorch with CUDA that sees it (torch.cuda.device_count())"
        )
    return json.loads(done.stdout.splitlines()[-1])


def answer() -> None:
    """In the process that is asked: print what is here, as JSON; an error where none computes."""
    import torch

    from shardcourse.build import facts

    torch.cuda.init()
    devices = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        torch.ones(1, device=f"cuda:{index}").add_(1).item()
        name = torch.cuda.get_device_name(index)
        devices.append({"name": name, "total": total, "free": free})
    found = {"devices": devices, "facts": facts.collect()}
    with suppress(Exception):  # what is only told must not be what fails
        found["facts"]["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    print(json.dumps(found))


def described(found: Mapping[str, Any]) -> str:
    """What `look` found, in a few lines."""
    device, versions = found["facts"]["device"], found["facts"]["versions"]
    lines = [f"{device['count']} × {device['name']}, driver {device['driver'] or 'unknown'}"]
    for index, one in enumerate(found["devices"]):
        held = (one["total"] - one["free"]) / GIB
        lines.append(f"GPU {index}: {one['name']}, {one['total'] / GIB:.1f} GiB")
        if held > 2:  # a context takes half of one
            lines[-1] += f", {held:.1f} of them in use: recordings want the GPU to themselves"
    lines.append(
        f"Python {versions['python']}, PyTorch {versions['torch']}, "
        f"CUDA {device['cuda'] or 'unknown'}, nccl {versions.get('nccl', 'none')}, "
        f"{device['cores']} cores"
    )
    return "\n".join(lines)


def missing(names: Iterable[str]) -> list[str]:
    """Those of the packages `names` that this Python lacks, as pip wants them."""
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    if "torch" in names and "torch" not in lacking:
        number = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch"))
        if number and tuple(map(int, number.groups())) < OLDEST:
            lacking.append("torch")
    return [f"torch>={OLDEST[0]}.{OLDEST[1]}" if n == "torch" else n for n in lacking]


def reason(log: str) -> str:
    """The line of a log that says best what went wrong: that of its error, or the last one."""
    told = _TELLS.findall(log)
    lines = [line for line in log.splitlines() if line.strip()]
    if not lines:
        return "it said nothing"
    # The first that pytest or `record` names; of tracebacks, the last.
    first = told[0] if told and told[0].startswith(("FAILED", "ERROR", "lessons/")) else ""
    return (first or (told or lines)[-1]).strip()
