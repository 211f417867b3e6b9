"""Part 5: experts on ranks, and the way there and back."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.measure import count

from .core import FLOAT32, TWO_GROUPS, Budget, Case, Part, Seen, Values, note

ONE = "one expert a token"
SINGLE = "one expert a rank"
SKEWED = "an expert that all tokens choose"
IDLE = "a rank whose experts get nothing"
EMPTY = "a rank without tokens"
NO_GRADIENT = "an input that wants no gradient"
FROZEN = "frozen experts"
TRANSPOSED = "a transposed input"
TWICE = "two forwards before a backward"


class Sizes:
    """Of a case: experts of a rank, chosen ones, hidden."""

    def __init__(self, case: Case) -> None:
        random = case.random("sizes")
        self.local = 1 if case.has(SINGLE) else random.randint(2, 3)
        self.experts = self.local * case.size
        usable = self.experts - (self.local if case.has(IDLE) else 0)
        self.k = 1 if case.has(ONE) else min(usable, 2)
        self.hidden = random.randint(9, 13)


def experts(case: Case, copy: int, rank: int) -> list[nn.Module]:
    """Those of a rank."""
    s, found = Sizes(case), []
    for number in range(rank * s.local, (rank + 1) * s.local):
        up = nn.Linear(s.hidden, s.hidden + 1, dtype=case.dtype)
        expert = nn.Sequential(up, nn.Tanh(), nn.Linear(s.hidden + 1, s.hidden, dtype=case.dtype))
        for name, p in expert.named_parameters():
            p.data.copy_(case.normal(*p.shape, key=(copy, number, name)) / s.hidden**0.5)
        found.append(expert.requires_grad_(not case.has(FROZEN)))
    return found


def batch(case: Case, copy: int, rank: int, turn: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A rank's rows, their experts, their weights, and what their outputs are multiplied with."""
    s, random = Sizes(case), case.random("batch", copy, rank, turn)
    tokens = 0 if case.has(EMPTY) and rank == case.size - 1 else 5 + 2 * rank + turn
    idle = case.random("idle").randrange(case.size) if case.has(IDLE) else None
    usable = [e for e in range(s.experts) if e // s.local != idle]
    rows = [random.sample(usable, s.k) for _ in range(tokens)]
    if case.has(SKEWED):
        rows = [[usable[-1], *(e for e in row if e != usable[-1])][: s.k] for row in rows]
    chosen = torch.tensor(rows, dtype=torch.int64).view(tokens, s.k)
    key = copy, rank, turn
    x = case.normal(tokens, s.hidden, key=(*key, "x"))
    if case.has(TRANSPOSED):
        x = x.t().contiguous().t()
    weights = case.normal(tokens, s.k, key=(*key, "weights")).requires_grad_()
    after = case.normal(tokens, s.hidden, key=(*key, "after"))
    return x.requires_grad_(not case.has(NO_GRADIENT)), chosen, weights, after


def turns(case: Case) -> int:
    """Forwards before the backward."""
    return 2 if case.has(TWICE) else 1


def work(engine: ModuleType, case: Case, copy: int, group: dist.ProcessGroup) -> Seen:
    """Forward, and backward of each token's own."""
    rank, seen = group.rank(), Seen({})
    mine, calls = experts(case, copy, rank), Counter[int]()
    for number, expert in enumerate(mine):
        expert.register_forward_hook(lambda *_, number=number: calls.update([number]))
    layer = engine.ExpertParallel(mine, group)
    batches = [batch(case, copy, rank, turn) for turn in range(turns(case))]
    with count.sent() as sent:
        outputs = [layer(x, chosen, weights) for x, chosen, weights, _ in batches]
        pairs = zip(outputs, batches, strict=True)
        sum((y * after).sum() for y, (*_, after) in pairs).backward()
    note(seen, sent, group)
    for turn, (y, (x, _, weights, _)) in enumerate(zip(outputs, batches, strict=True), 1):
        seen.values |= _of_turn(turn, rank, y, x, weights)
    seen.values |= _of_experts(case, mine, rank)
    if calls and max(calls.values()) > turns(case):
        seen.wrong = f"calls one expert {max(calls.values())} times in {turns(case)} forwards"
    return seen


def _of_turn(turn: int, rank: int, y: Tensor, x: Tensor, weights: Tensor) -> Values:
    found: Values = {f"the output of rank {rank}'s batch {turn}": y.detach()}
    for name, tensor in (("input", x), ("weights", weights)):
        found[f"the gradient of rank {rank}'s {name} {turn}"] = _gradient(tensor)
    return found


def _of_experts(case: Case, mine: list[nn.Module], rank: int) -> Values:
    first = rank * Sizes(case).local
    return {
        f"the gradient of expert {number}'s `{name}`": _gradient(p)
        for number, expert in enumerate(mine, first)
        for name, p in expert.named_parameters()
    }


def _gradient(tensor: Tensor) -> Tensor | None:
    """None is as good as zeros where a gradient is wanted."""
    if tensor.grad is None and tensor.requires_grad:
        return torch.zeros_like(tensor)
    return tensor.grad


def right(case: Case, copy: int) -> list[Values]:
    """All experts and all tokens in one process, one token after the other."""
    everyone = [experts(case, copy, rank) for rank in range(case.size)]
    flat = [expert for mine in everyone for expert in mine]
    found: list[Values] = []
    for rank in range(case.size):
        values: Values = {}
        for turn in range(turns(case)):
            x, chosen, weights, after = batch(case, copy, rank, turn)
            rows = [
                sum(weights[t, j] * flat[e](x[t]) for j, e in enumerate(row))
                for t, row in enumerate(chosen.tolist())
            ]
            y = torch.stack(rows) if rows else torch.zeros_like(x)
            if rows:
                (y * after).sum().backward()
            values |= _of_turn(turn + 1, rank, y, x, weights)
        found.append(values)
    for rank, mine in enumerate(everyone):
        found[rank] |= _of_experts(case, mine, rank)
    return found


def budget(case: Case, copy: int, rank: int) -> Budget:
    """Rows to the experts and back, in both directions, and some whole numbers."""
    s, n = Sizes(case), case.size
    own = other = 0.0
    for turn in range(turns(case)):
        for source in range(n):
            chosen = batch(case, copy, source, turn)[1]
            mine = int((chosen // s.local == rank).sum())
            # Of an all-to-all (n - 1) / n are counted, whoever stays at home.
            if source == rank:
                own += max(chosen.numel() - mine, (n - 1) / n * chosen.numel())
            other += mine * (n - 1) / n if source == rank else mine
    back = 0 if case.has(NO_GRADIENT) and case.has(FROZEN) else 1
    ways = 1 if case.has(NO_GRADIENT) else 2
    rows = own * (1 + back) + other * ways  # there and their gradients; back and theirs
    numbers = 8 * (own + other) + 16 * n * s.experts * turns(case)
    size = rows * s.hidden * case.dtype.itemsize
    return Budget(size + numbers, turns(case) * (4 * n + 6))


PART = Part(
    "experts",
    ("ExpertParallel",),
    visible=((2, (ONE, SINGLE)), (3, (ONE,)), (2, ()), (4, ())),
    hidden=(
        (TWO_GROUPS,),
        (SKEWED,),
        (IDLE,),
        (IDLE, NO_GRADIENT),
        (EMPTY,),
        (EMPTY, ONE),
        (FROZEN, TRANSPOSED),
        (FLOAT32, SINGLE),
        (TWICE,),
        (TWO_GROUPS, EMPTY, IDLE),
    ),
    extra=(SKEWED, EMPTY, TRANSPOSED, SINGLE),
    work=work,
    right=right,
    budget=budget,
)
