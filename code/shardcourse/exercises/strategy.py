"""Exercises of the lesson `strategy`."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import add_cases, add_number, make_isclose
from shardlab.common.machines import Machine
from shardlab.common.shapes import PRESETS, Config
from shardtools import strategy

_TOLERANCE = 0.05  # tolerance of the two constants: measurements scatter by 1 %

_MODEL, _GPUS, _BATCH = PRESETS["llama-3-70b"], 64, 256
_GPU = replace(strategy.MACHINES["a100"], network_bandwidth=100e9 / 8 / 8)
_MAX_SLOWDOWN = 1.10  # largest time, relative to the fastest layout


_T, _H, _RATE = 8, 8192, 989e12
_SPEED = 4 * 2 * (_T - 1) * 2 * _RATE / (6 * 12 * _H)
add_number("strategy_wire", _SPEED, "bytes per second", rel_tol=0.01,
       success="Right: 188 GB/s, and NVLink has 450. A PCIe slot has 32.", hints={
    _SPEED / 2: "Either an all-reduce sends its bytes twice, once in each half of the ring, or "
    "a number has 2 bytes: one of these is missing.",
    _SPEED / _T: "The products are divided by 8, and the all-reduces are not: each GPU computes an "
    "eighth of the products, and sends (t−1)/t of an all-reduce.",
})  # fmt: skip

_DAYS = 6 * 8e9 * 15e12 / (512 * 989e12 * 0.4) / 86400
add_number("strategy_days", _DAYS, "days", rel_tol=0.01,
       success="Right: 41 days. Twice the GPUs halve it only if MFU stays the same.", hints={
    _DAYS * 86400: "That is the number of seconds.",
    _DAYS / 3: "That is forward alone: backward takes twice as much.",
})  # fmt: skip


def _make_measurements(seed: int) -> tuple[Any, tuple[float, float], str]:
    """Return layers' (operations, seconds), their true (launch, rate), and a hint."""
    rng = random.Random(seed)
    launch, rate = rng.uniform(1e-3, 8e-3), rng.uniform(1e14, 7e14)
    sizes = [launch * rate * 2 ** (k / 2 - 4) for k in range(17)]
    layers = [(w, max(launch, w / rate) * rng.uniform(0.99, 1.01)) for w in sizes]
    for k in rng.sample(range(17), 3):
        layers[k] = layers[k][0], layers[k][1] * rng.uniform(2, 6)
    rng.shuffle(layers)
    words = f"{launch:.3g} and {rate:.3g} made these measurements. Do slow runs distort yours?"
    return (layers,), (launch, rate), words


add_cases(
    "strategy_corner",
    [_make_measurements(seed) for seed in range(20)],
    equal=lambda got, want: all(map(make_isclose(_TOLERANCE), got, want)),
    success="Right, on twenty lists: two constants, and no slow run moves them.",
)


def check_layout(
    answer: Any, config: Config, gpu: Machine, gpus: int, batch: int, max_seconds: float
) -> str:
    """Judge a layout for `gpus` and `batch`: it has to fit and take at most `most` seconds."""
    if not isinstance(answer, strategy.Layout):
        raise WrongAnswer(f"The answer should be a strategy.Layout, not a {type(answer).__name__}.")
    if answer.world_size != gpus:
        raise WrongAnswer(f"d · t · p · c = {answer.world_size}; there are {gpus} GPUs.")
    if answer.global_batch != batch:
        raise WrongAnswer(f"d · b · m = {answer.global_batch} sequences; a step has {batch}.")
    try:
        oom = strategy.explain_oom(config, gpu, answer)
        found = strategy.predict(config, gpu, answer)
    except ValueError as error:
        raise WrongAnswer(f"This layout cannot split the model: {error}.") from None
    if oom:
        raise WrongAnswer(oom)
    needs, taken = f"{found.memory.reserved / 1e9:.1f} GB", found.seconds.total
    if taken > max_seconds:
        slow = strategy.explain_slowness(config, gpu, answer)
        raise WrongAnswer(f"It fits, with {needs} on the fullest GPU, but it is too slow. {slow}")
    return f"Right: {needs} on the fullest GPU, and a step of some {taken:.1f} s."


@cache
def _find_fastest() -> float:
    return strategy.plan(_MODEL, _GPU, _GPUS, _BATCH).feasible[0].seconds


@add_exercise("strategy_layout")
def _check_answer(answer: Any) -> str:
    words = check_layout(answer, _MODEL, _GPU, _GPUS, _BATCH, _MAX_SLOWDOWN * _find_fastest())
    return f"{words} The fastest takes {_find_fastest():.1f} s."
