"""Benchmarks: their contenders' steps, at toy sizes, in one process as in a benchmark."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from shardlab.model import PRESETS

NANO = PRESETS["nano"]


def _benchmark(topic: str) -> ModuleType:
    folder = str(Path(__file__).parents[3] / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(topic)


def data_parallel_beside_ddp():
    times = _benchmark("data_parallel").measure(NANO, 1, False, 1)
    assert len(times["ours"]) == len(times["theirs"]) == 1


def tensor_parallel_beside_dtensor():
    module = _benchmark("tensor_parallel")
    times = module.measure(NANO, 1, False, 1, [module.OURS, *module.THEIRS])
    assert all(len(times[name]) == 1 for name in (module.OURS, *module.THEIRS))


def zero_beside_fsdp_and_deepspeed():
    names = ["stage 1", "stage 3", "FSDP2, reshard_after_forward=True", "DeepSpeed stage 1"]
    times = _benchmark("zero").measure(NANO, 1, False, 1, names)
    assert all(len(times[name]) == 1 for name in names)
