"""One case of one part: run on real ranks, beside what one process does.

A case is some ranks, some traits ("a frozen layer") and a seed, from which its sizes and numbers
are drawn. Each rank loads the file anew and returns what it has, and what it sent. Here that is
compared; what is said names the case, the tensor and the ranks, and never how to do it.
"""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import ranks
from shardlab.measure import count

TWO_GROUPS = "two groups at once"  # ranks 0 and 2, and 1 and 3: no rank's number is its place
FLOAT32 = "float32"
PATIENCE = 20.0  # seconds that a case may take; quiet, it takes less than one
HANGS = 2  # so many cases of a part may take longer: the rest is not run, for a minute is over
EXTRA = 0.15  # how probable one more trait is in a hidden case
Values = dict[str, Tensor | None]  # by what they are: "after step 1 the gradient of `fc.bias`"


@dataclass(frozen=True)
class Case:
    """What one run is like; its sizes and numbers come from the seed."""

    number: int
    size: int  # ranks of a group
    traits: tuple[str, ...]
    seed: int
    hidden: bool = False

    def has(self, trait: str) -> bool:
        """Whether it has a trait."""
        return trait in self.traits

    @property
    def groups(self) -> list[list[int]]:
        """The ranks of each group; all groups do the same, with other numbers."""
        return [[0, 2], [1, 3]] if self.has(TWO_GROUPS) else [list(range(self.size))]

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and data, where a part says nothing else."""
        return torch.float32 if self.has(FLOAT32) else torch.float64

    @property
    def tolerance(self) -> float:
        """Of a tensor's largest number: 1e5 times what its type rounds, or 1e3 in float32."""
        return 1e-4 if any(FLOAT32 in trait for trait in self.traits) else 1e-10

    @property
    def words(self) -> str:
        """As people are told of it."""
        kind = "hidden; " if self.hidden else ""
        world = 2 * self.size if self.has(TWO_GROUPS) else self.size
        return f"case {self.number} ({kind}{', '.join([f'{world} ranks', *self.traits])})"

    def random(self, *key: Any) -> Random:
        """Random numbers that belong to a key."""
        return Random(f"{self.seed} {key}")

    def normal(self, *shape: int, key: Any, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of normal numbers that belong to a key."""
        generator = torch.Generator().manual_seed(self.random(key).getrandbits(60))
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or self.dtype)


@dataclass
class Seen:
    """What a rank had and sent."""

    values: Values
    bytes: float = 0.0
    messages: int = 0
    wrong: str = ""  # by a rule of the part's


@dataclass(frozen=True)
class Budget:
    """What a rank may send at most: bytes, and calls and messages."""

    bytes: float
    messages: int


@dataclass(frozen=True)
class Part:
    """A file of the engine, and how it is judged."""

    name: str
    defines: tuple[str, ...]
    visible: tuple[tuple[int, tuple[str, ...]], ...]  # ranks, traits
    hidden: tuple[tuple[str, ...], ...]  # the traits that each has for certain
    extra: tuple[str, ...]  # those that any may have as well
    work: Callable[[ModuleType, Case, int, dist.ProcessGroup], Seen]  # on a rank of a group
    right: Callable[[Case, int], list[Values]]  # what each rank of a group has to have
    budget: Callable[[Case, int, int], Budget]  # of a group's rank
    most: int = 4  # ranks of a group

    def cases(self, seed: int) -> list[Case]:
        """The visible cases, which are always the same, and the hidden ones of a seed."""
        found = [Case(i, size, traits, i) for i, (size, traits) in enumerate(self.visible, 1)]
        random = Random(f"{seed} {self.name}")
        for traits in self.hidden:
            more = [t for t in self.extra if t not in traits and random.random() < EXTRA]
            size = 2 if TWO_GROUPS in (*traits, *more) else random.randint(2, self.most)
            number, own = len(found) + 1, random.getrandbits(60)
            found.append(Case(number, size, (*traits, *more), own, hidden=True))
        return found


@dataclass
class Result:
    """How one case went."""

    case: Case
    message: str = ""  # what is wrong; "" where it passed
    bytes: tuple[float, float] | None = None  # of the rank that sent most: sent, allowed
    messages: tuple[int, int] | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.message


@dataclass
class Grade:
    """How one part went."""

    part: str
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> int:
        """How many cases did."""
        return sum(result.passed for result in self.results)


def loaded(file: Path) -> ModuleType:
    """On a rank: the file as a module; its folder comes first where it imports others."""
    sys.dont_write_bytecode = True
    for own in file.parent.glob("*.py"):  # whoever started the rank may have imported a namesake
        sys.modules.pop(own.stem, None)
    sys.path.insert(0, str(file.parent))
    return importlib.import_module(file.stem)


def _missing(file: Path, names: Sequence[str]) -> list[str]:
    engine = loaded(file)
    return [name for name in names if not hasattr(engine, name)]


def _on_rank(part: Part, file: Path, case: Case) -> Seen:
    mine: Any = None
    for copy, members in enumerate(case.groups):
        whole = len(members) == dist.get_world_size()
        group = dist.group.WORLD if whole else dist.new_group(members)
        if dist.get_rank() in members:
            mine = copy, group
    engine = loaded(file)
    torch.manual_seed(dist.get_rank())  # nothing that a file draws is alike on all ranks
    return part.work(engine, case, *mine)


_run = partial(ranks.run, device="cpu", show=False, apart=True)


def grade(part: Part, file: Path, seed: int) -> Grade:
    """Judge a file by all cases of its part; not by those that follow two that do not end."""
    begin, result = time.monotonic(), Grade(part.name)
    stop, hangs = unfit(part, file), 0
    for case in part.cases(seed):
        one = Result(case, stop) if stop else judge(part, file, case)
        result.results.append(one)
        hangs += one.seconds > PATIENCE
        if "NotImplementedError" in one.message:
            stop = "not run: what this part needs is not written yet"
        elif hangs == HANGS:
            stop = f"not run: {HANGS} cases before did not end"
    result.seconds = time.monotonic() - begin
    return result


def unfit(part: Part, file: Path) -> str:
    """Why a file cannot be judged at all; "" if it can."""
    if not file.is_file():
        return f"there is no {file.name} in this folder"
    try:
        (missing,) = _run(_missing, 1, file, part.defines, timeout=PATIENCE)
    except ranks.RankError as error:
        said = told(str(error)).removeprefix("rank 0 of 1 ")
        return f"{file.name} cannot be imported: it {said}"
    return f"{file.name} does not define {' and '.join(missing)}" if missing else ""


def judge(part: Part, file: Path, case: Case) -> Result:
    """Run one case, and say what is wrong with what came out."""
    begin = time.monotonic()
    result = Result(case)
    try:
        world = sum(len(members) for members in case.groups)
        seen = _run(_on_rank, world, part, file, case, timeout=PATIENCE)
    except ranks.RankError as error:
        result.message = told(str(error))
    else:
        result.message = _judged(part, case, seen, result)
    result.seconds = time.monotonic() - begin
    return result


def told(error: str) -> str:
    """What ranks raised, once where they raised the same, without the grader's own lines.

    One that calls their code stays where there is no other: it says what was done with a result.
    """
    calls = re.compile(r"  at grade/.*, in (_on_rank|work|_loss|<listcomp>):")
    others = re.compile(r"  at (grade/.*, in (_missing|loaded):|count/traffic.py, )")
    found: dict[tuple[str, ...], list[str]] = {}
    for block in re.split(r"\n(?=\S)", error):
        first, *places = block.splitlines()
        kept = [line for line in places if not (calls.match(line) or others.match(line))]
        if not any(line.startswith("  at ") for line in kept):
            kept += [line for line in places if calls.match(line)][-1:]
        rank, of, what = first.partition(" of ")
        one = re.fullmatch(r"rank (\d+)", rank) if "raised" in what else None
        found.setdefault((of + what if one else first, *kept), []).append(one[1] if one else "")
    texts = []
    for (first, *rest), names in found.items():
        who = f"rank{'s' * (len(names) > 1)} {', '.join(names)}" if names[0] else ""
        texts += [who + first, *rest]
    return "\n".join(texts)


def _judged(part: Part, case: Case, seen: list[Seen], result: Result) -> str:
    right: dict[int, Values] = {}
    budgets: dict[int, Budget] = {}
    for copy, members in enumerate(case.groups):
        right |= dict(zip(members, part.right(case, copy), strict=True))
        budgets |= {rank: part.budget(case, copy, i) for i, rank in enumerate(members)}
    most = max(budgets, key=lambda rank: seen[rank].bytes - budgets[rank].bytes)
    result.bytes = seen[most].bytes, budgets[most].bytes
    often = max(budgets, key=lambda rank: seen[rank].messages - budgets[rank].messages)
    result.messages = seen[often].messages, budgets[often].messages
    if wrong := differs([one.values for one in seen], [right[r] for r in sorted(right)], case):
        return wrong
    for rank, one in enumerate(seen):
        if one.wrong:
            return f"the values are right, but rank {rank} {one.wrong}"
    if result.bytes[0] > result.bytes[1]:
        sent, allowed = result.bytes
        return (
            f"the values are right, but rank {most} sends {sent:.0f} bytes in all, and at most "
            f"{allowed:.0f} are needed"
        )
    if result.messages[0] > result.messages[1]:
        sent, allowed = result.messages
        return (
            f"the values are right, but rank {often} calls collectives or sends {sent} times in "
            f"all, and {allowed} times are enough"
        )
    return ""


def differs(got: list[Values], want: list[Values], case: Case) -> str:
    """The first tensor that is not what one process has, and on which ranks; "" if all are."""
    names = list(dict.fromkeys(name for values in want for name in values))
    wrong: dict[str, dict[int, str]] = {}
    for name in names:
        for rank, values in enumerate(want):
            if name in values and (text := _gap(got[rank].get(name), values[name], case.tolerance)):
                wrong.setdefault(name, {})[rank] = text
    if not wrong:
        return ""
    name, found = next(iter(wrong.items()))
    holders = [rank for rank, values in enumerate(want) if name in values]
    bad, good = list(found), [rank for rank in holders if rank not in found]
    where = f"on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
    if not good and len(bad) > 1:
        where = "on all ranks" if len(bad) == len(want) else where
    rest = "; the other ranks agree with one process" if good else ""
    others = len(wrong) - 1
    more = f" ({others} more tensor{'s are' if others > 1 else ' is'} wrong, too)" if others else ""
    said, _, factor = found[bad[0]].partition(": ")
    if factor and all(text.endswith(factor) for text in found.values()):
        said = found[bad[0]]
    first = bad[0]
    alike = not any(_gap(want[rank][name], want[first][name], 0.0) for rank in bad)
    if alike and any(_gap(got[r].get(name), got[first].get(name), case.tolerance) for r in bad):
        where += ", and on each differently"
    return f"{name} {said} {where}{rest}{more}"


def _gap(got: Any, want: Tensor | None, tolerance: float) -> str:
    if want is None:
        return "" if got is None else "should be None, and is a tensor"
    if not isinstance(got, Tensor):
        return "is None" if got is None else f"is a {type(got).__name__}"
    if got.shape != want.shape:
        return f"has the shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"is {got.dtype} instead of {want.dtype}".replace("torch.", "")
    if not want.numel():
        return ""
    got, want = got.detach().double(), want.detach().double()
    gap, scale = (got - want).abs().max().item(), max(want.abs().max().item(), 1e-3)
    if gap <= tolerance * scale:
        return ""
    text = f"differs by {gap:.1g}"
    if (whole := (want * want).sum().item()) > 0:
        factor = (got * want).sum().item() / whole
        if (got - factor * want).abs().max().item() <= 1e-3 * scale:
            size = f"{factor:.3g} times as large" if abs(factor) >= 1e-3 else "0"
            text += f": it is {size}" * (f"{factor:.3g}" != "1")
    return text


def note(seen: Seen, sent: count.Sent, group: dist.ProcessGroup) -> None:
    """Put into `seen` what went out, and complain of what went to other groups."""
    within = sent.within(group)
    if (sent.calls, sent.messages) != (within.calls, within.messages):
        seen.wrong = seen.wrong or "sends in a group that it was not given"
    seen.messages += sent.messages + sum(sent.calls.values())
    # What goes to one rank or comes from one is passed on by all others but one.
    seen.bytes += sent.leaving(group.size(), others=1 - 1 / group.size())
