"""A plain GPT, cut by layers into parts, and dealt out to the stages of a pipeline.

A part is some blocks in a row; the first has the embedding as well, the last the norm and the head.
Its parameters keep the names that they have in the whole model, and stay the same tensors: nothing
is copied, and the model does not know.

Shapes in names: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardlab.model import GPT, loss

from .actions import Schedule
from .balance import balance
from .execute import Loss, Pipeline
from .stage import stage_of


class Part(nn.Module):
    """Blocks in a row of `model`, with what stands before the first or behind the last of all."""

    def __init__(self, model: GPT, blocks: range, first: bool, last: bool):
        super().__init__()
        self.plain_names = True
        self.hidden = model.config.hidden
        self.embedding = model.embedding if first else None
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, S] tokens (first part) or [B, S, H], to [B, S, H] or [B, S, V] logits (last part)."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        if self.head is not None:
            x = self.head(self.norm(x))  # [B, S, H] @ [H, V]
        return x

    def between(self, tokens_BS: Tensor) -> tuple[torch.Size, torch.dtype]:
        """Shape [B, S, H] and dtype of what travels from part to part for these tokens."""
        return torch.Size((*tokens_BS.shape, self.hidden)), next(self.parameters()).dtype


def cut(model: GPT, layers: int | Sequence[int]) -> list[Part]:
    """Cut `model` into parts, in order.

    layers: how many parts, which get blocks as equally as possible; or how many blocks each part
    gets. The first and the last may get 0: then they are the embedding or the head alone.

    Raises ValueError for more parts than blocks, and for blocks that are not those of the model.
    """
    total = len(model.blocks)
    if isinstance(layers, int):
        if isinstance(layers, bool) or not 1 <= layers <= total:
            what = f"allowed are 1 to {total} parts of a model with {total} layers"
            raise ValueError(f"layers={layers}: {what}")
        layers = balance([1] * total, layers)
    layers = list(layers)
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in layers)
    if not layers or not whole or 0 in layers[1:-1] or sum(layers) != total:
        what = f"whole numbers whose sum is {total}, 0 at the ends alone"
        raise ValueError(f"layers={layers}: allowed are {what}")
    ends = list(accumulate(layers))
    return [
        Part(model, range(end - size, end), first=i == 0, last=i == len(layers) - 1)
        for i, (size, end) in enumerate(zip(layers, ends, strict=True))
    ]


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
    what this rank does not hold is freed. Raises ValueError as `cut` and Pipeline do.
    """
    stage = stage_of(schedule, group)
    parts = cut(model, schedule.parts if layers is None else list(layers))
    if len(parts) != schedule.parts:
        what = f"allowed is one number for each of {schedule.parts} parts"
        raise ValueError(f"layers={list(layers or ())}: {what}")
    mine = [parts[number] for number in schedule.placement[stage]]
    if recompute:
        for part in mine:
            for block in part.blocks.values():
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
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
