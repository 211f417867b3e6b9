"""The exercises of lesson `strategy`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from shardcourse.exercises import Wrong, exercise
from shardcourse.exercises.forms import called, number
from shardcourse.exercises.layouts import laid_out
from shardlab.common.shapes import PRESETS
from shardtools import strategy

_NEAR = 0.05  # of the two constants: measurements scatter by 1 %

_MODEL, _GPUS, _BATCH = PRESETS["llama-3-70b"], 64, 256
_GPU = replace(strategy.MACHINES["a100"], between=100e9 / 8 / 8)
_SLOWER = 1.10  # than the fastest


_T, _H, _RATE = 8, 8192, 989e12
_WIRE = 4 * 2 * (_T - 1) * 2 * _RATE / (6 * 12 * _H)
number("strategy_wire", _WIRE, "bytes per second", rel=0.01,
       says="Right: 188 GB/s, and NVLink has 450. A PCIe slot of 32 has not.", wrong={
    _WIRE / 2: "Either an all-reduce sends its bytes twice, once in each half of the ring, or "
    "a number has 2 bytes: one of these is missing.",
    _WIRE / _T: "The products are shared by 8, and the all-reduces are not: each GPU takes an "
    "eighth of the one, and (t−1)/t of the other.",
    _WIRE * _T: "Each of the 8 GPUs has an eighth of the products.",
    _WIRE * _T / (_T - 1): "Close: a ring of 8 sends 7/8 of each half.",
    _WIRE * 3: "Backward counts, too: 6 operations for each weight, not 2.",
    _WIRE / 4: "There are four all-reduces, two in forward and two in backward.",
})  # fmt: skip

_DAYS = 6 * 8e9 * 15e12 / (512 * 989e12 * 0.4) / 86400
number("strategy_days", _DAYS, "days", rel=0.01,
       says="Right: 41 days. Twice the GPUs take half of it only while MFU holds.", wrong={
    _DAYS * 86400: "Those are seconds.",
    _DAYS * 24: "Those are hours.",
    _DAYS / 3: "That is forward alone: backward takes twice as much.",
    _DAYS * 0.4: "That is at the data sheet's rate; an MFU of 40 % takes longer.",
    _DAYS * 8 / 6: "Nothing is recomputed here: 6 operations, not 8.",
    _DAYS * 512: "That is on one GPU.",
})  # fmt: skip


@exercise("strategy_corner")
def _corner(answer: Callable[..., Any]) -> str:
    if not callable(answer):
        raise Wrong(f"The answer should be a function, not {answer!r}.")
    for seed in range(20):
        chance = random.Random(seed)
        launch, rate = chance.uniform(1e-3, 8e-3), chance.uniform(1e14, 7e14)
        sizes = [launch * rate * 2 ** (k / 2 - 4) for k in range(17)]
        layers = [(w, max(launch, w / rate) * chance.uniform(0.99, 1.01)) for w in sizes]
        for k in chance.sample(range(17), 3):
            layers[k] = layers[k][0], layers[k][1] * chance.uniform(2, 6)
        chance.shuffle(layers)
        found = called(answer, layers)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise Wrong(f"It should return (launch, rate), not {found!r}.")
        for name, got, want in zip(("launch", "rate"), found, (launch, rate), strict=True):
            if not isinstance(got, int | float):
                raise Wrong(f"{name} should be a number, not {got!r}.")
            if abs(got / want - 1) > _NEAR:
                words = f"{name} is {got:.3g}, and {want:.3g} made these measurements."
                swapped = abs(found[0] / rate - 1) < _NEAR
                also = " Are the two in the other order?" if swapped else _why(got / want, name)
                raise Wrong(words + also)
    return "Right, on twenty lists: two constants, and no slow run moves them."


def _why(ratio: float, name: str) -> str:
    if name == "launch" and ratio > 1:
        return " Do slow runs or large layers pull at it?"
    if name == "rate" and ratio < 1:
        return " Do slow runs pull at it, or small layers, which wait for their launch?"
    return ""


@cache
def _least() -> float:
    return strategy.plan(_MODEL, _GPU, _GPUS, _BATCH).fits[0].seconds


@exercise("strategy_layout")
def _layout(answer: Any) -> str:
    words = laid_out(answer, strategy, _MODEL, _GPU, _GPUS, _BATCH, lambda: _SLOWER * _least())
    return f"{words} The fastest takes {_least():.1f} s."
