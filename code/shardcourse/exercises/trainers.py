"""Exercises of the lesson `trainers`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcourse.exercises import Wrong, exercise
from shardcourse.exercises.forms import number, run_answer

number("lightning_steps", 64, "steps",
       says="Right: 4 times as many windows in a step, a quarter of the steps.", wrong={
    256: "That is one GPU's. batch_size is a rank's, and four ranks make a step.",
    1024: "The sampler shares out the windows, it does not repeat them.",
})  # fmt: skip


def _steps(rank: int, size: int) -> list[tuple[str, bool, list[Tensor]]]:
    """Return cases: a name, whether the step may be made, and this rank's gradient shards."""
    last, fine = size - 1, torch.full((3,), 0.5)
    inf, nan = torch.tensor([1.0, math.inf]), torch.tensor([math.nan, 1.0])
    large = torch.full((2,), 3e38)  # finite, but a sum of them overflows
    return [
        ("all gradients are finite", True, [fine, -fine]),
        ("the last rank alone has an inf", False, [fine, inf] if rank == last else [fine]),
        ("rank 0 alone has a nan", False, [nan, fine] if rank == 0 else [fine, fine]),
        ("rank 0 has inf and rank 1 -inf", False, [[inf], [-inf], [fine], [fine]][rank]),
        ("the last rank holds no shard, and all is finite", True, [] if rank == last else [fine]),
        ("rank 0 holds no shard, and the last rank has an inf", False, [inf] * (rank == last)),
        ("all gradients are large and finite", True, [large]),
    ]


def _decisions(answer: Callable[..., Any]) -> list[Any]:
    steps = _steps(dist.get_rank(), dist.get_world_size())
    return [answer([g.clone() for g in gradients], dist.group.WORLD) for *_, gradients in steps]


@exercise("my_decision")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        found = zip(*run_answer(_decisions, size, answer), strict=True)
        for said, (name, right, _) in zip(found, _steps(0, size), strict=True):
            where = f"{size} ranks, {name}: "
            for rank, one in enumerate(said):
                if not isinstance(one, bool):
                    kind = type(one).__name__
                    raise Wrong(f"{where}rank {rank} returned {one!r}, a {kind}; return a bool.")
            if len(set(said)) > 1:
                raise Wrong(
                    f"{where}rank {said.index(True)} makes the step, rank {said.index(False)} "
                    "skips it, and from here on their scales differ. A rank knows its own shards "
                    "alone: what has to travel?"
                )
            if said[0] != right:
                do, should = ("make", "skip") if said[0] else ("skip", "make")
                raise Wrong(f"{where}all ranks {do} the step, and they should {should} it.")
    return "Right, on 2 and 4 ranks: one flag travels, and all decide alike."


number("skipped_steps", 17, "steps",
       says="Right: one that is forgiven, and 16 that halve, from 2^32 to 2^16.", wrong={
    16: "Each halving costs a step: 16. But with a hysteresis of 2 the first overflow leaves "
    "the scale as it is.",
    15: "2^32 and 2^17 both overflow: count them.",
})  # fmt: skip
