"""Schedules are data: what each stage of a pipeline does, action by action.

A model is cut into `parts`, in order. Each of p stages (ranks of one pipeline) holds v of them, its
chunks; a batch is cut into m micro-batches, and each has to pass every part forward and backward.

An action is one such pass, or one message:

    F   forward                               RF  receive the activations that an F needs
    B   backward, whole                       SF  send the activations that an F made
    I   backward, of the input alone          RB  receive the gradient that a B or an I needs
    W   backward, of the weights alone        SB  send the gradient that a B or an I made

I and W are what the zero bubble paper calls B and W. A receive is posted where it stands and waited
for by the pass that needs it; a send is on its way while the stage goes on.

The standard library alone: whoever only looks at schedules does not have to load torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("RF", "SF", "RB", "SB")


class Action(NamedTuple):
    """One pass of a micro-batch through one chunk of a stage, or one message."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """What every stage does, in order. `schedules` makes them; `validate` judges them."""

    name: str
    stages: int  # [p]
    microbatches: int  # [m]
    chunks: int  # [v] on each stage
    placement: tuple[tuple[int, ...], ...]  # [stage][chunk] -> part
    orders: tuple[tuple[Action, ...], ...]  # by stage: passes alone (F B I W)
    # By stage: passes and messages. None: `messages` puts the messages in, which is always right.
    # Whoever wants to see wrong ones says so: dataclasses.replace(schedule, given=…).
    given: tuple[tuple[Action, ...], ...] | None = None

    @property
    def parts(self) -> int:
        """Parts of the model: p · v."""
        return self.stages * self.chunks

    @property
    def splits(self) -> bool:
        """Whether the backward is split into I and W."""
        return any(action.kind == "W" for order in self.orders for action in order)

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """By stage, what its rank executes: passes and messages."""
        from .messages import with_messages

        return with_messages(self) if self.given is None else self.given

    @cached_property
    def _owners(self) -> dict[int, tuple[int, int]]:
        return {
            part: (stage, chunk)
            for stage, parts in enumerate(self.placement)
            for chunk, part in enumerate(parts)
        }

    def owner(self, part: int) -> tuple[int, int]:
        """(stage, chunk) of a part. Raises ValueError for a part that is not there."""
        if part not in self._owners:
            raise ValueError(f"part={part}: allowed are 0 to {self.parts - 1}")
        return self._owners[part]

    def name_of(self, action: Action) -> str:
        """`F3`, or `F3.1` where stages have several chunks."""
        return f"{action.kind}{action.microbatch}" + (f".{action.chunk}" if self.chunks > 1 else "")

    def __str__(self) -> str:
        """A line for each stage, which `from_text` reads back."""
        return "\n".join(" ".join(map(self.name_of, order)) for order in self.orders)


def loop(stages: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Placement round and round: chunk c of stage s is part c · p + s."""
    return tuple(tuple(c * stages + s for c in range(chunks)) for s in range(stages))


def vee(stages: int) -> tuple[tuple[int, ...], ...]:
    """Placement down and up again: the first stage holds the first part and the last."""
    return tuple((s, 2 * stages - 1 - s) for s in range(stages))


def from_text(
    *rows: str, name: str = "yours", placement: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """A schedule written by hand, a row for each stage: from_text("F0 F1 B0 B1", "F0 B0 F1 B1").

    Written F3.1 for chunk 1 of a stage; `placement` is `loop` unless given. Rows may hold messages,
    too: then every message is theirs. Nothing is judged here but the writing: `validate` does that.

    Raises ValueError for a word that is no action.
    """
    stages = [tuple(_parsed(word, row) for word in text.split()) for row, text in enumerate(rows)]
    everything = [action for order in stages for action in order]
    if not everything:
        raise ValueError("rows=(): allowed is a row of actions for each stage, as 'F0 F1 B0 B1'")
    chunks = 1 + max(action.chunk for action in everything)
    if placement is not None:
        chunks = len(placement[0]) if placement else 0
        if len(placement) != len(rows) or {len(parts) for parts in placement} != {chunks}:
            raise ValueError(f"placement={placement}: allowed is a row of parts for each stage")
    messages = any(action.kind in MESSAGES for action in everything)
    return Schedule(
        name,
        len(rows),
        1 + max(action.microbatch for action in everything),
        chunks,
        loop(len(rows), chunks) if placement is None else tuple(map(tuple, placement)),
        tuple(tuple(action for action in order if action.kind in COMPUTE) for order in stages),
        tuple(stages) if messages else None,
    )


def _parsed(word: str, row: int) -> Action:
    found = re.fullmatch(r"(F|B|I|W|RF|SF|RB|SB)(\d+)(?:\.(\d+))?", word)
    if not found:
        kinds = ", ".join(COMPUTE + MESSAGES)
        raise ValueError(
            f"stage {row}, {word!r}: allowed are {kinds} with a micro-batch, and with a chunk "
            "where there are several: F3, F3.1"
        )
    return Action(found[1], int(found[2]), int(found[3] or 0))
