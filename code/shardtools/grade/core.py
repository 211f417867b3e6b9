"""Cases drawn from a seed, and the checks that every part makes on its ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import ranks
from shardlab.measure import count

TWO_GROUPS = "two groups at once"  # ranks 0, 2 and 1, 3: world ranks differ from group ranks
CASE_TIMEOUT_S = 20.0  # on a quiet machine a case takes less than a second
EXTRA_TRAIT_PROBABILITY = 0.15


@dataclass(frozen=True)
class Case:
    """One run: a number of ranks, traits, and a seed for its sizes and values."""

    number: int
    size: int  # number of ranks in a group
    traits: tuple[str, ...]
    seed: int
    hidden: bool = False

    def has_trait(self, trait: str) -> bool:
        """Return True if the case has this trait."""
        return trait in self.traits

    @property
    def groups(self) -> list[list[int]]:
        """The ranks of each group; all groups compute the same on different data."""
        return [[0, 2], [1, 3]] if self.has_trait(TWO_GROUPS) else [list(range(self.size))]

    @property
    def dtype(self) -> torch.dtype:
        """The default dtype of weights and data."""
        return torch.float32 if self.has_trait("float32") else torch.float64

    @property
    def tolerance(self) -> float:
        """The tolerance relative to a tensor's largest value: 1e5 roundings, or 1e3 in float32."""
        return 1e-4 if any("float32" in trait for trait in self.traits) else 1e-10

    def __str__(self) -> str:
        kind = "hidden; " if self.hidden else ""
        world = sum(len(members) for members in self.groups)
        return f"case {self.number} ({kind}{', '.join([f'{world} ranks', *self.traits])})"

    def make_rng(self, *key: Any) -> Random:
        """Return a random number generator that depends on the case and `key` alone."""
        return Random(f"{self.seed} {key}")

    def draw_normal(self, *shape: int, key: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of normal numbers that depend on the case and `key` alone."""
        generator = torch.Generator().manual_seed(self.make_rng(key).getrandbits(60))
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or self.dtype)


@dataclass(frozen=True)
class Part:
    """One file of the engine and the traits of its cases."""

    name: str
    visible: tuple[tuple[int, tuple[str, ...]], ...]  # group size, traits
    hidden: tuple[tuple[str, ...], ...]  # the fixed traits of each hidden case
    extra: tuple[str, ...]  # traits that a hidden case may have in addition

    def draw_cases(self, seed: int) -> list[Case]:
        """Return the visible cases, which are always the same, and the hidden cases of `seed`."""
        cases = [Case(i, size, traits, i) for i, (size, traits) in enumerate(self.visible, 1)]
        random = Random(f"{seed} {self.name}")
        for traits in self.hidden:
            drawn = [t for t in self.extra if random.random() < EXTRA_TRAIT_PROBABILITY]
            traits = (*traits, *(t for t in drawn if t not in traits))
            size = 2 if TWO_GROUPS in traits else random.randint(2, 4)
            cases.append(Case(len(cases) + 1, size, traits, random.getrandbits(60), hidden=True))
        return cases


Check = Callable[[ModuleType, Case, int, dist.ProcessGroup], None]


def run_case(check: Check, file: Path, case: Case) -> None:
    """Run `check` on every rank of a case. Raises RankError if a rank fails or does not end."""
    world = sum(len(members) for members in case.groups)
    options = {"device": "cpu", "show": False, "timeout": CASE_TIMEOUT_S}
    ranks.run(_check_on_rank, world, check, file, case, **options)


def _check_on_rank(check: Check, file: Path, case: Case) -> None:
    copies = [dist.new_group(members) for members in case.groups]
    copy = next(i for i, members in enumerate(case.groups) if dist.get_rank() in members)
    group = copies[copy] if len(copies) > 1 else dist.group.WORLD
    sys.dont_write_bytecode = True
    sys.modules.pop(file.stem, None)  # the process that started the rank may have a namesake
    sys.path.insert(0, str(file.parent))
    engine = importlib.import_module(file.stem)
    torch.manual_seed(dist.get_rank())  # random numbers that the file draws differ across ranks
    check(engine, case, copy, group)


def check_values(
    where: str, got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], case: Case
) -> None:
    """Assert that this rank's tensors equal those of one process."""
    for name, right in want.items():
        value = got[name]
        if right is None:
            assert value is None, f"{where} {name} should be None"
            continue
        assert isinstance(value, Tensor), f"{where} {name} is {value}, not a tensor"
        scale = max(right.abs().max().item(), 1e-3) if right.numel() else 0
        try:
            torch.testing.assert_close(value, right, rtol=0, atol=case.tolerance * scale)
        except AssertionError as error:
            raise AssertionError(f"{where} {name}: {error}") from None


def get_gradients(**tensors: Tensor) -> dict[str, Tensor | None]:
    """Return the gradient of each tensor."""
    return {name: tensor.grad for name, tensor in tensors.items()}


class Traffic:
    """A counter of the bytes, collectives and messages that leave a rank of `group`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.bytes, self.messages = group, 0.0, 0

    def add_sent(self, sent: count.Traffic) -> None:
        """Count sent bytes and messages, and assert that they were sent in the group."""
        inside = sent.get_group_traffic(self.group)
        assert (sent.calls, sent.messages) == (inside.calls, inside.messages), (
            "sends in another group than the one it was given"
        )
        self.messages += sent.messages + sum(sent.calls.values())
        # A broadcast or a reduce passes through all ranks but one.
        self.bytes += sent.count_ring_bytes(self.group.size(), others=1 - 1 / self.group.size())

    def check_limits(self, max_bytes: float, max_messages: int) -> None:
        """Assert that no more bytes and messages were sent than needed."""
        assert self.bytes <= max_bytes, f"sends {self.bytes:.0f} bytes; {max_bytes:.0f} are enough"
        assert self.messages <= max_messages, (
            f"calls collectives or sends {self.messages} times; {max_messages} times are enough"
        )
