"""A layout that a reader found: whether it is of the job, fits, and takes no longer than it may."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from shardcourse.exercises import Wrong
from shardlab.common.machines import Machine
from shardlab.common.shapes import Config


def laid_out(
    answer: Any,
    strategy: ModuleType,
    config: Config,
    gpu: Machine,
    gpus: int,
    batch: int,
    most: Callable[[], float],
) -> str:
    """That a layout of so many GPUs and sequences fits and takes `most` seconds, in words.

    strategy: the module, which stands above this one.
    """
    if not isinstance(answer, strategy.Layout):
        raise Wrong(f"The answer should be a strategy.Layout, not a {type(answer).__name__}.")
    if answer.ranks != gpus:
        degrees = "d · t · p" + (" · c" if answer.cp > 1 else "")
        raise Wrong(f"{degrees} = {answer.ranks}; there are {gpus} GPUs.")
    if answer.batch != batch:
        raise Wrong(f"d · b · m = {answer.batch} sequences; a step has {batch}.")
    try:
        full = strategy.fullness(config, gpu, answer)
        found = strategy.predict(config, gpu, answer)
    except ValueError as error:
        raise Wrong(f"The model cannot be cut so: {error}.") from None
    if full:
        raise Wrong(full)
    needs, taken = f"{found.memory.reserved / 1e9:.1f} GB", found.seconds.total
    if taken > most():
        slow = strategy.slowness(config, gpu, answer)
        raise Wrong(f"It fits, with {needs} on the fullest GPU, but it is too slow. {slow}")
    return f"Right: {needs} on the fullest GPU, and a step of some {taken:.1f} s."
