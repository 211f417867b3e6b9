"""Pipelines, ready to run: of a plain GPT, and of stages that sleep instead of computing.

Four ranks on two cores cannot show how four GPUs would overlap: they take the cores from each
other. Sleeping takes none. What is real then are the ranks, the messages and the waiting.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.gpt.model import GPT, loss
from shardlab.ranks.agree import check_same

from .core import Loss, Pipeline
from .deferred import Task
from .parts import Form, compute_again, cut, stage_of
from .schedules import Schedule
from .simulate import Times, each_stage


def distribute(
    model: GPT,
    schedule: Schedule,
    group: dist.ProcessGroup,
    *,
    layers: Sequence[int] | None = None,
    loss: Loss = loss,
    replicas: dist.ProcessGroup | None = None,
    recompute: bool = False,
    record: bool = False,
    back: dist.ProcessGroup | None = None,
    check: bool = True,
) -> Pipeline:
    """Cut `model` into the parts of `schedule`, and keep those of this rank.

    Every rank of `group` calls it with a model of the same shape. layers: blocks in each part, in
    the order of the parts; by default as equal as possible, whatever embedding and head cost.
    recompute: keep of each block its input alone, and compute the rest again in backward. A tied
    embedding whose head is on another stage is there twice and kept equal, as `twin`. For the other
    arguments see Pipeline.

    The model's own modules are used and changed (recompute, split backward): let go of it, so that
    what this rank does not hold is freed. Raises ValueError as `cut` and Pipeline do, and on every
    rank when models or layers differ.
    """
    stage = stage_of(schedule, group)
    parts = cut(model, schedule.parts if layers is None else list(layers))
    if len(parts) != schedule.parts:
        what = f"allowed is one number for each of {schedule.parts} parts"
        raise ValueError(f"layers={list(layers or ())}: {what}")
    check_same(group, config=model.config, layers=layers and list(layers))
    mine = [parts[number] for number in schedule.placement[stage]]
    if recompute:
        compute_again([block for part in mine for block in part.blocks.values()])
    ends = [schedule.owner(number)[0] for number in (0, schedule.parts - 1)]
    twin = None
    if model.config.tied and stage in ends and ends[0] != ends[1]:
        twin = model.embedding.weight, ends[1] if stage == ends[0] else ends[0]
    return Pipeline(
        mine,
        schedule,
        group,
        loss,
        replicas=replicas,
        twin=twin,
        record=record,
        back=back,
        check=check,
    )


class Sleeping(nn.Module):
    """A part of a model that takes its time and gives on what it was given.

    forward, backward_input, backward_weight: seconds of a micro-batch's passes. What travels is
    `size` numbers of float32 for each sequence. Its one weight's gradient counts the backwards.

    Raises ValueError for times below 0 and sizes below 1.
    """

    def __init__(
        self, forward: float, backward_input: float, backward_weight: float, size: int = 1
    ):
        super().__init__()
        self.seconds, self.size = (forward, backward_input, backward_weight), size
        self.weight = nn.Parameter(torch.zeros(()))
        self.later: list[Task] | None = None  # where `defer` wants the weights' share

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] of any dtype (the first part) or [B, size] float32, to [B, size]."""
        begin = time.perf_counter()
        if not x.is_floating_point() or x.shape[1:] != (self.size,):
            x = torch.zeros(len(x), self.size)
        y = _Sleep.apply(x, self.weight, self)
        _sleep(begin, self.seconds[0])
        return y

    def between(self, tokens: Tensor) -> Form:
        """Shape and dtype of what travels from part to part."""
        return torch.Size((len(tokens), self.size)), torch.float32


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: Sleeping) -> Tensor:
        ctx.part = part
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        _sleep(time.perf_counter(), ctx.part.seconds[1])
        weights = partial(_backward_weights, ctx.part)
        if ctx.part.later is None:
            weights()
        else:
            ctx.part.later.append(weights)
        return dy, None, None


@torch.no_grad()
def _backward_weights(part: Sleeping) -> None:
    """Count this backward, and take its time."""
    begin, one = time.perf_counter(), torch.ones(())
    part.weight.grad = one if part.weight.grad is None else part.weight.grad + one
    _sleep(begin, part.seconds[2])


def _sleep(begin: float, seconds: float) -> None:
    """Until so many seconds after `begin`: what was done since then is part of them."""
    time.sleep(max(0.0, begin + seconds - time.perf_counter()))


def asleep(
    schedule: Schedule,
    group: dist.ProcessGroup,
    forward: Times = 0.01,
    backward_input: Times = 0.01,
    backward_weight: Times = 0.01,
    size: int = 1,
    **options: Any,
) -> Pipeline:
    """A pipeline of stages that sleep; times in seconds, as in `simulate`.

    Times are those of a micro-batch in a whole stage, a number for all or one for each; a chunk
    takes 1/v of it. size: see Sleeping. options: those of Pipeline. Its `step` takes anything with
    as many rows as there are to be sequences: step(torch.zeros(8, 1), torch.zeros(8, 1)).

    Raises ValueError for times below 0, lists that are not one for each stage, a size below 1.
    """
    stage = stage_of(schedule, group)
    names = "forward", "backward_input", "backward_weight"
    given = zip(names, (forward, backward_input, backward_weight), strict=True)
    mine = [each_stage(*one, schedule)[stage] / schedule.chunks for one in given]
    parts = [Sleeping(*mine, size) for _ in range(schedule.chunks)]
    return Pipeline(parts, schedule, group, _mean, **options)


def _mean(y: Tensor, _targets: Tensor) -> Tensor:
    return y.mean()
