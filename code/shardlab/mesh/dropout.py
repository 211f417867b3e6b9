"""Dropout that does not depend on the mesh: numbers follow from a place in model and batch.

Ranks that each draw on from their own generator drop something else under every mesh. Ranks that
start from one seed drop the same in every copy and in every stage, which is worse: four copies then
see one mask, and the noise that they should average out stays.

So the generator is set before each block: to a number made of seed, step, block and micro-batch,
the latter counted over all copies. Whoever computes a block for a micro-batch drops the same. Ranks
of a tensor group drop the same outside of regions, and inside each its heads' part of one mask
(`tensor_parallel.dropout`, `sequence_parallel.dropout`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from shardlab.common import gpu
from shardlab.common.arguments import check_kind, check_whole
from shardlab.data_parallel.buckets import in_backward


class PlacedDropout:
    """Sets the generator before each of `blocks`, by number, whenever one is called in training.

    One process gets the same numbers with all blocks, and the micro-batches of all copies one after
    the other: the first copy's first.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], seed: int = 0):
        check_kind((Mapping, nn.ModuleDict), blocks=blocks)
        check_kind(nn.Module, **{f"blocks[{number!r}]": block for number, block in blocks.items()})
        check_whole(0, seed=seed)
        self.seed, self.calls = seed, dict.fromkeys(blocks, 0)
        for number, block in blocks.items():
            block.register_forward_pre_hook(partial(self._before, number))

    def begin(self, step: int, first: int = 0, device: torch.device | None = None) -> None:
        """Begin a step, whose micro-batches here are counted from `first`."""
        self.step = step
        self.calls = dict.fromkeys(self.calls, first)
        self.generators = [torch.default_generator]  # heads draw on the CPU for all
        if device is not None and gpu.is_on(device):
            self.generators.append(gpu.module().default_generators[device.index or 0])
        self.before = [generator.get_state() for generator in self.generators]

    def end(self) -> None:
        """The generators go on where they stood before the step."""
        for generator, state in zip(self.generators, self.before, strict=True):
            generator.set_state(state)

    def _before(self, number: str, block: nn.Module, _args: Any) -> None:
        if not block.training or in_backward():  # what is recomputed sets itself back
            return
        place = self.seed, self.step, number, self.calls[number]
        self.calls[number] += 1
        for generator in self.generators:
            generator.manual_seed(zlib.crc32(repr(place).encode()))
