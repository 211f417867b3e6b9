"""Benchmarks: their contenders' steps, at toy sizes, in one process as in a benchmark."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from shardlab.gpt.model import PRESETS

from .common import folder

NANO = PRESETS["nano"]


def _benchmark(topic: str) -> ModuleType:
    """By its path: `train` alone is the script to take home."""
    folder = Path(__file__).parents[3] / "benchmarks"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # where it finds side_by_side
    spec = importlib.util.spec_from_file_location(f"benchmark_{topic}", folder / f"{topic}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data_parallel_beside_ddp():
    times = _benchmark("data_parallel").measure(NANO, 1, False, 1)
    assert len(times["ours"]) == len(times["theirs"]) == 1


def experts_beside_deepspeed():
    module = _benchmark("experts")
    config = replace(module.SHAPE, hidden=64, ffn=64)
    times = module.measure(config, True, 32, False, 1)
    assert len(times[module.OURS]) == len(times[module.THEIRS]) == 1


def tensor_parallel_beside_dtensor():
    module = _benchmark("tensor_parallel")
    times = module.measure(NANO, 1, False, 1, [module.OURS, *module.THEIRS])
    assert all(len(times[name]) == 1 for name in (module.OURS, *module.THEIRS))


def train_beside_lightning():
    for strategy in ("ddp", "fsdp2"):
        with folder() as place:
            times = _benchmark("train").measure(NANO, strategy, 1, 1, place)
        assert all(len(times[name]) == 1 for name in ("ours", "theirs", "bare"))


def zero_beside_fsdp_and_deepspeed():
    names = ["stage 1", "stage 3", "FSDP2, reshard_after_forward=True", "DeepSpeed stage 1"]
    times = _benchmark("zero").measure(NANO, 1, False, 1, names)
    assert all(len(times[name]) == 1 for name in names)
