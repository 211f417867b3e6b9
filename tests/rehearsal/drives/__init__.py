"""Drives: small runs of every topic's main functions, on pretended GPUs. See `common`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

TOPICS = [
    name for _, name, _ in pkgutil.iter_modules(__path__) if name not in ("common", "__main__")
]


def drives(topic: str) -> dict[str, Callable[[], Any]]:
    """Return the drives of a topic, by name: `topic.function`."""
    module = importlib.import_module(f"{__name__}.{topic}")
    named = vars(module) | getattr(module, "DRIVES", {})
    found = {n: f for n, f in named.items() if getattr(f, "__module__", 0) == module.__name__}
    return {f"{topic}.{n}": f for n, f in found.items() if callable(f) and not n.startswith("_")}


def list_gpu_counts(drive: Callable[[], Any], whole: bool = True) -> tuple[int, ...]:
    """Return the numbers of GPUs on which a drive runs: all, or those of each day."""
    return getattr(drive, "gpus", (1, 2)) if whole else getattr(drive, "daily", (2,))


def result(drive: Callable[[], Any], gpus: int) -> str:
    """Run a drive on `gpus` pretended GPUs; return "" or the error."""
    from shardlab import ranks

    try:
        if getattr(drive, "on_caller", False):
            drive()
        else:
            ranks.run(_run_quietly, max(2, gpus), drive, timeout=60, show=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run_quietly(drive: Callable[[], Any]) -> None:
    drive()  # without results to send back
