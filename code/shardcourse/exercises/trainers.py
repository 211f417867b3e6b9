"""Exercises of the lesson `trainers`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import add_number, create_group, run_answer

add_number("lightning_steps", 64, "steps",
       success="Right: 4 times as many windows in a step, a quarter of the steps.", hints={
    256: "That is for one GPU. batch_size is per rank, and four ranks make a step.",
    1024: "The sampler distributes the windows, it does not repeat them.",
})  # fmt: skip


def _make_steps(rank: int, size: int) -> list[tuple[str, bool, list[Tensor]]]:
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


def _run_decisions(answer: Callable[..., Any]) -> list[Any]:
    steps = _make_steps(dist.get_rank(), dist.get_world_size())
    with create_group() as group:
        return [answer([g.clone() for g in gradients], group) for *_, gradients in steps]


@add_exercise("my_decision")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        found = zip(*run_answer(_run_decisions, size, answer), strict=True)
        for said, (name, right, _) in zip(found, _make_steps(0, size), strict=True):
            where = f"{size} ranks, {name}: "
            for rank, one in enumerate(said):
                if not isinstance(one, bool):
                    kind = type(one).__name__
                    words = f"rank {rank} returned {one!r}, a {kind}"
                    raise WrongAnswer(f"{where}{words}; return a bool.")
            if len(set(said)) > 1:
                raise WrongAnswer(
                    f"{where}rank {said.index(True)} makes the step, rank {said.index(False)} "
                    "skips it, and from here on their scales differ. A rank knows only its own "
                    "shards: what has to be communicated?"
                )
            if said[0] != right:
                do, should = ("make", "skip") if said[0] else ("skip", "make")
                raise WrongAnswer(f"{where}all ranks {do} the step, and they should {should} it.")
    return "Right, on 2 and 4 ranks: one flag is reduced, and all ranks decide the same."


add_number("skipped_steps", 17, "steps",
       success="Right: one within the hysteresis, and 16 that halve 2^32 to 2^16.", hints={
    16: "Each halving costs a step: 16. But with a hysteresis of 2 the first overflow leaves "
    "the scale as it is.",
    15: "2^32 and 2^17 both overflow: count them.",
})  # fmt: skip
