"""Exercises of the lesson `strategy`."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

from shardcourse.exercises import Wrong, exercise
from shardcourse.exercises.forms import cases, close, number
from shardlab.common.machines import Machine
from shardlab.common.shapes import PRESETS, Config
from shardtools import strategy

_NEAR = 0.05  # tolerance of the two constants: measurements scatter by 1 %

_MODEL, _GPUS, _BATCH = PRESETS["llama-3-70b"], 64, 256
_GPU = replace(strategy.MACHINES["a100"], network_bandwidth=100e9 / 8 / 8)
_SLOWER = 1.10  # largest time, relative to the fastest layout


_T, _H, _RATE = 8, 8192, 989e12
_WIRE = 4 * 2 * (_T - 1) * 2 * _RATE / (6 * 12 * _H)
number("strategy_wire", _WIRE, "bytes per second", rel=0.01,
       says="Right: 188 GB/s, and NVLink has 450. A PCIe slot of 32 has not.", wrong={
    _WIRE / 2: "Either an all-reduce sends its bytes twice, once in each half of the ring, or "
    "a number has 2 bytes: one of these is missing.",
    _WIRE / _T: "The products are shared by 8, and the all-reduces are not: each GPU takes an "
    "eighth of the one, and (t−1)/t of the other.",
})  # fmt: skip

_DAYS = 6 * 8e9 * 15e12 / (512 * 989e12 * 0.4) / 86400
number("strategy_days", _DAYS, "days", rel=0.01,
       says="Right: 41 days. Twice the GPUs take half of it only while MFU holds.", wrong={
    _DAYS * 86400: "Those are seconds.",
    _DAYS / 3: "That is forward alone: backward takes twice as much.",
})  # fmt: skip


def _measured(seed: int) -> tuple[tuple[list[tuple[float, float]]], tuple[float, float], str]:
    """Return layers' (operations, seconds), the (launch, rate) behind them, and a hint."""
    chance = random.Random(seed)
    launch, rate = chance.uniform(1e-3, 8e-3), chance.uniform(1e14, 7e14)
    sizes = [launch * rate * 2 ** (k / 2 - 4) for k in range(17)]
    layers = [(w, max(launch, w / rate) * chance.uniform(0.99, 1.01)) for w in sizes]
    for k in chance.sample(range(17), 3):
        layers[k] = layers[k][0], layers[k][1] * chance.uniform(2, 6)
    chance.shuffle(layers)
    words = f"{launch:.3g} and {rate:.3g} made these measurements. Do slow runs pull at yours?"
    return (layers,), (launch, rate), words


cases(
    "strategy_corner",
    [_measured(seed) for seed in range(20)],
    equal=lambda got, want: all(map(close(_NEAR), got, want)),
    says="Right, on twenty lists: two constants, and no slow run moves them.",
)


def laid_out(answer: Any, config: Config, gpu: Machine, gpus: int, batch: int, most: float) -> str:
    """Judge a layout for `gpus` and `batch`: it has to fit and take at most `most` seconds."""
    if not isinstance(answer, strategy.Layout):
        raise Wrong(f"The answer should be a strategy.Layout, not a {type(answer).__name__}.")
    if answer.world_size != gpus:
        raise Wrong(f"d · t · p · c = {answer.world_size}; there are {gpus} GPUs.")
    if answer.global_batch != batch:
        raise Wrong(f"d · b · m = {answer.global_batch} sequences; a step has {batch}.")
    try:
        full = strategy.explain_oom(config, gpu, answer)
        found = strategy.predict(config, gpu, answer)
    except ValueError as error:
        raise Wrong(f"The model cannot be cut so: {error}.") from None
    if full:
        raise Wrong(full)
    needs, taken = f"{found.memory.reserved / 1e9:.1f} GB", found.seconds.total
    if taken > most:
        slow = strategy.explain_slowness(config, gpu, answer)
        raise Wrong(f"It fits, with {needs} on the fullest GPU, but it is too slow. {slow}")
    return f"Right: {needs} on the fullest GPU, and a step of some {taken:.1f} s."


@cache
def _fastest() -> float:
    return strategy.plan(_MODEL, _GPU, _GPUS, _BATCH).feasible[0].seconds


@exercise("strategy_layout")
def _layout(answer: Any) -> str:
    words = laid_out(answer, _MODEL, _GPU, _GPUS, _BATCH, _SLOWER * _fastest())
    return f"{words} The fastest takes {_fastest():.1f} s."
