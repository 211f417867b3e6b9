"""The parts of a model that a rank holds: parts of a plain GPT, or any modules in sequence.

A part is a run of consecutive blocks; the first part also has the embedding, the last the norm and
the head. Parameters keep their names and tensors from the whole model: nothing is copied, and the
model does not change. `LocalParts` is this rank's parts under those names, checked against other
ranks.

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
from shardlab.ranks.gather import gather_named_tensors

from .schedules import Schedule
from .simulate import balance_layers
from .validate import validate

TensorSpec = tuple[torch.Size, torch.dtype]  # of the tensors between parts, for given tokens


class Part(nn.Module):
    """Consecutive blocks of `model`; the first part has the embedding, the last norm and head."""

    def __init__(self, model: GPT, blocks: range, first: bool, last: bool):
        super().__init__()
        self.plain_names = True
        self.hidden = model.config.hidden
        self.embedding = model.embedding if first else None
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [B, S] (first part) or x [B, S, H] to [B, S, H] or logits [B, S, V] (last)."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        if self.head is not None:
            x = self.head(self.norm(x))  # [B, S, H] @ [H, V]
        return x

    def message_spec(self, tokens_BS: Tensor) -> TensorSpec:
        """Return shape [B, S, H] and dtype of the tensors between parts, for these tokens."""
        return torch.Size((*tokens_BS.shape, self.hidden)), next(self.parameters()).dtype


def recompute_blocks(blocks: Sequence[nn.Module]) -> None:
    """Keep only the input of each block, and recompute the rest in backward; changes `blocks`.

    Chen et al. 2016 (arXiv 1604.06174). torch stops recomputing once backward has what it needs.
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def split_model(model: GPT, layers: int | Sequence[int]) -> list[Part]:
    """Cut `model` into parts, in order.

    layers: the number of parts, which get blocks as equally as possible, or the number of blocks in
    each part. The first and the last may get 0: they are then the embedding or the head alone.

    Raises ValueError for more parts than blocks, and for numbers that do not add up to the blocks.
    """
    total = len(model.blocks)
    if isinstance(layers, int):
        if not 1 <= layers <= total:
            what = f"must be 1 to {total} parts of a model with {total} layers"
            raise ValueError(f"layers={layers}: {what}")
        layers = balance_layers([1] * total, layers)
    layers = list(layers)
    if not layers or min(layers) < 0 or 0 in layers[1:-1] or sum(layers) != total:
        what = f"must be whole numbers with sum {total}, and 0 only at the ends"
        raise ValueError(f"layers={layers}: {what}")
    ends = list(accumulate(layers))
    return [
        Part(model, range(end - size, end), first=i == 0, last=i == len(layers) - 1)
        for i, (size, end) in enumerate(zip(layers, ends, strict=True))
    ]


class LocalParts:
    """The parts that a rank holds, one per chunk. Stage s is rank s.

    message_spec: returns a `TensorSpec`; by default the first part's method. check: validate the
    schedule. same_values: further values that must be the same on all ranks.

    Raises ValueError on all ranks of the group if any of them has another number of parts than
    chunks, or another schedule than the rest.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup,
        message_spec: Callable[[Tensor], TensorSpec] | None = None,
        check: bool = True,
        **same_values: Any,
    ):
        self.parts, self.schedule, self.group = list(parts), schedule, group
        self.stage = get_stage(schedule, group)
        if check:
            validate(schedule)
        self.message_spec = message_spec or self.parts[0].message_spec
        wrong, actions = None, zlib.crc32(repr(schedule.actions).encode())
        if len(self.parts) != (chunks := schedule.chunks):
            wrong = f"parts has {len(self.parts)} modules: must have {chunks}, one for each chunk"
        check_same(
            group, local_error=wrong, schedule=f"{schedule.name} ({actions:08x})", **same_values
        )
        self.part_numbers = schedule.placement[self.stage]
        tensors = (t for part in self.parts for t in (*part.parameters(), *part.buffers()))
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters; those of a GPT under their names in the whole model."""
        seen = set()
        for part, prefix in self._named_parts():
            for name, parameter in part.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield prefix + name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters, each once."""
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers, under the same names."""
        return {
            prefix + name: value
            for part, prefix in self._named_parts()
            for name, value in part.state_dict().items()
        }

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return all ranks' parameters and buffers, in the model's order; every rank calls this."""
        mine = {name: value.detach().clone() for name, value in self.state_dict().items()}
        numbered = zip(self._named_parts(), self.part_numbers, strict=True)
        places = {prefix + n: i for (part, prefix), i in numbered for n in part.state_dict()}
        return gather_named_tensors(mine, self.group, places)

    def _named_parts(self) -> list[tuple[nn.Module, str]]:
        """Return the parts with the prefix of their names: "" if names are the model's own."""
        numbered = zip(self.parts, self.part_numbers, strict=True)
        return [(p, "" if hasattr(p, "plain_names") else f"{number}.") for p, number in numbered]


def get_stage(schedule: Schedule, group: dist.ProcessGroup) -> int:
    """Return this rank's stage. Raises ValueError unless the group has one rank per stage."""
    rank, size = check_group(group)
    if size != schedule.stages:
        what = f"must have {schedule.stages}, one for each stage of {schedule.name}"
        raise ValueError(f"group has {size} ranks: {what}")
    return rank
