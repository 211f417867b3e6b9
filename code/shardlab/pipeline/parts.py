"""What a rank of a pipeline holds: parts of a plain GPT, or any modules that fit together.

A part is some blocks in a row; the first has the embedding as well, the last the norm and the head.
Its parameters keep the names that they have in the whole model, and stay the same tensors: nothing
is copied, and the model does not know. `Held` is what a rank has of them, by those names, and
whether the ranks agree about it.

Shapes in names: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardlab.gpt.model import GPT
from shardlab.ranks import check_group, check_same
from shardlab.ranks.gather import named

from .schedules import Schedule
from .simulate import balance
from .validate import validate

Form = tuple[torch.Size, torch.dtype]  # of what travels from part to part for some tokens


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

    def between(self, tokens_BS: Tensor) -> Form:
        """Shape [B, S, H] and dtype of what travels from part to part for these tokens."""
        return torch.Size((*tokens_BS.shape, self.hidden)), next(self.parameters()).dtype


def compute_again(blocks: Sequence[nn.Module]) -> None:
    """Keep of each of `blocks` its input alone, and compute the rest again in backward, in place.

    Chen et al. 2016 (arXiv 1604.06174). torch stops as soon as it has again what backward needs.
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def cut(model: GPT, layers: int | Sequence[int]) -> list[Part]:
    """Cut `model` into parts, in order.

    layers: how many parts, which get blocks as equally as possible; or how many blocks each part
    gets. The first and the last may get 0: then they are the embedding or the head alone.

    Raises ValueError for more parts than blocks, and for blocks that are not those of the model.
    """
    total = len(model.blocks)
    if isinstance(layers, int):
        if not 1 <= layers <= total:
            what = f"allowed are 1 to {total} parts of a model with {total} layers"
            raise ValueError(f"layers={layers}: {what}")
        layers = balance([1] * total, layers)
    layers = list(layers)
    if not layers or min(layers) < 0 or 0 in layers[1:-1] or sum(layers) != total:
        what = f"whole numbers whose sum is {total}, 0 at the ends alone"
        raise ValueError(f"layers={layers}: allowed are {what}")
    ends = list(accumulate(layers))
    return [
        Part(model, range(end - size, end), first=i == 0, last=i == len(layers) - 1)
        for i, (size, end) in enumerate(zip(layers, ends, strict=True))
    ]


class Held:
    """The parts that a rank holds: one for each chunk. Rank and stage are the same number.

    between: see `Form`; by default what the first of the parts says. check: judge the schedule.
    given: what else has to be the same on all ranks.

    Raises ValueError on all ranks of the group alike, when one of them has not a part for each
    chunk, or another schedule than the rest.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup,
        between: Callable[[Tensor], Form] | None = None,
        check: bool = True,
        **given: Any,
    ):
        self.parts, self.schedule, self.group = list(parts), schedule, group
        self.stage = stage_of(schedule, group)
        if check:
            validate(schedule)
        self.between = between or self.parts[0].between
        wrong, actions = None, zlib.crc32(repr(schedule.actions).encode())
        if len(self.parts) != (chunks := schedule.chunks):
            wrong = f"parts has {len(self.parts)} modules: allowed is {chunks}, one for each chunk"
        check_same(group, wrong=wrong, schedule=f"{schedule.name} ({actions:08x})", **given)
        self.numbers = schedule.placement[self.stage]  # of its parts
        tensors = (t for part in self.parts for t in (*part.parameters(), *part.buffers()))
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters; those of a GPT under the names that they have in the model."""
        seen = set()
        for part, prefix in self._named():
            for name, parameter in part.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield prefix + name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers, under those names."""
        return {
            prefix + name: value
            for part, prefix in self._named()
            for name, value in part.state_dict().items()
        }

    def full_state_dict(self) -> dict[str, Tensor]:
        """All ranks' parameters and buffers, in the model's order; every rank has to call it."""
        mine = {name: value.detach().clone() for name, value in self.state_dict().items()}
        numbered = zip(self._named(), self.numbers, strict=True)
        places = {prefix + n: i for (part, prefix), i in numbered for n in part.state_dict()}
        return named(mine, self.group, places)

    def _named(self) -> list[tuple[nn.Module, str]]:
        """Parts, and what goes before their names: nothing where these are the model's own."""
        numbered = zip(self.parts, self.numbers, strict=True)
        return [(p, "" if hasattr(p, "plain_names") else f"{number}.") for p, number in numbered]


def stage_of(schedule: Schedule, group: dist.ProcessGroup) -> int:
    """This rank's stage. Raises ValueError for a group that does not have a rank for each stage."""
    rank, size = check_group(group)
    if size != schedule.stages:
        what = f"allowed are {schedule.stages}, one for each stage of {schedule.name}"
        raise ValueError(f"group has {size} ranks: {what}")
    return rank
