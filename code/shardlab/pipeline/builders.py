"""Build pipelines that are ready to run: of a plain GPT, or of stages that sleep.

Four ranks on two cores cannot show how four GPUs overlap, because the ranks compete for the cores.
Sleeping needs no core. The ranks, the messages and the waits are then still real.
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
from shardlab.ranks.checks import check_same

from .core import Loss, Pipeline
from .deferred import Task
from .parts import TensorSpec, get_stage, recompute_blocks, split_model
from .schedules import Schedule
from .simulate import Times, expand_per_stage


def distribute_model(
    model: GPT,
    schedule: Schedule,
    group: dist.ProcessGroup,
    *,
    layers: Sequence[int] | None = None,
    loss: Loss = loss,
    replicas: dist.ProcessGroup | None = None,
    recompute: bool = False,
    record: bool = False,
    reverse_group: dist.ProcessGroup | None = None,
    check: bool = True,
) -> Pipeline:
    """Split `model` into the parts of `schedule`, and keep this rank's parts.

    Every rank of `group` calls this with a model of the same shape. layers: blocks in each part, in
    the order of the parts; by default as equal as possible, without regard to embedding and head.
    recompute: keep only each block's input, and recompute the rest in backward. A tied embedding
    whose head is on another stage exists twice and is kept equal (`tied_parameter`). For the other
    arguments see Pipeline.

    The model's own modules are used and changed (recompute, split backward): drop other references
    to the model, so that parts on other ranks are freed. Raises ValueError as `split_model` and
    Pipeline do, and on every rank when models or layers differ.
    """
    stage = get_stage(schedule, group)
    parts = split_model(model, schedule.parts if layers is None else list(layers))
    if len(parts) != schedule.parts:
        what = f"must have one number for each of {schedule.parts} parts"
        raise ValueError(f"layers={list(layers or ())}: {what}")
    check_same(group, config=model.config, layers=layers and list(layers))
    mine = [parts[number] for number in schedule.placement[stage]]
    if recompute:
        recompute_blocks([block for part in mine for block in part.blocks.values()])
    ends = [schedule.find_owner(number)[0] for number in (0, schedule.parts - 1)]
    tied = None
    if model.config.tied and stage in ends and ends[0] != ends[1]:
        tied = model.embedding.weight, ends[1] if stage == ends[0] else ends[0]
    options = {"replicas": replicas, "reverse_group": reverse_group, "tied_parameter": tied}
    return Pipeline(mine, schedule, group, loss, record=record, check=check, **options)


class SleepingPart(nn.Module):
    """A part of a model that sleeps for its passes' times and returns its input.

    forward, backward_input, backward_weight: seconds per micro-batch. Messages have `size` float32
    numbers per sequence. The gradient of its only weight counts the backwards.

    Raises ValueError for times below 0 and sizes below 1.
    """

    def __init__(
        self, forward: float, backward_input: float, backward_weight: float, size: int = 1
    ):
        super().__init__()
        self.seconds, self.size = (forward, backward_input, backward_weight), size
        self.weight = nn.Parameter(torch.zeros(()))
        self.deferred_tasks: list[Task] | None = None  # set by `defer_weight_gradients`

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, ...] of any dtype (the first part) or [B, size] float32 to [B, size]."""
        begin = time.perf_counter()
        if not x.is_floating_point() or x.shape[1:] != (self.size,):
            x = torch.zeros(len(x), self.size)
        y = _SleepFunction.apply(x, self.weight, self)
        _sleep_until(begin + self.seconds[0])
        return y

    def message_spec(self, tokens: Tensor) -> TensorSpec:
        """Return shape and dtype of the tensors that are sent from part to part."""
        return torch.Size((len(tokens), self.size)), torch.float32


class _SleepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: SleepingPart) -> Tensor:
        ctx.part = part
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        _sleep_until(time.perf_counter() + ctx.part.seconds[1])
        task = partial(_backward_weights, ctx.part)
        if ctx.part.deferred_tasks is None:
            task()
        else:
            ctx.part.deferred_tasks.append(task)
        return dy, None, None


@torch.no_grad()
def _backward_weights(part: SleepingPart) -> None:
    begin, one = time.perf_counter(), torch.ones(())
    part.weight.grad = one if part.weight.grad is None else part.weight.grad + one
    _sleep_until(begin + part.seconds[2])


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def make_sleeping_pipeline(
    schedule: Schedule,
    group: dist.ProcessGroup,
    forward: Times = 0.01,
    backward_input: Times = 0.01,
    backward_weight: Times = 0.01,
    size: int = 1,
    **options: Any,
) -> Pipeline:
    """Make a pipeline of stages that sleep; times in seconds, as in `simulate`.

    Times are per micro-batch and whole stage, one number for all stages or one for each; a chunk
    takes 1/v of them. size: see SleepingPart. options: for Pipeline. `step` takes any tensors with
    as many rows as there are sequences: step(torch.zeros(8, 1), torch.zeros(8, 1)).

    Raises ValueError for times below 0, lists that are not one per stage, and sizes below 1.
    """
    stage = get_stage(schedule, group)
    names = "forward", "backward_input", "backward_weight"
    given = zip(names, (forward, backward_input, backward_weight), strict=True)
    seconds = [expand_per_stage(*one, schedule)[stage] / schedule.chunks for one in given]
    parts = [SleepingPart(*seconds, size) for _ in range(schedule.chunks)]
    return Pipeline(parts, schedule, group, lambda y, _targets: y.mean(), **options)
