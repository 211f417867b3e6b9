"""Part 5: experts on ranks, and the exchange of tokens with them."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.measure import count

from .core import TWO_GROUPS, Case, Part, Traffic, check_values

ONE, SINGLE = "one expert a token", "one expert a rank"
IDLE, EMPTY = "a rank whose experts get nothing", "a rank without tokens"
NO_GRADIENT = "an input that wants no gradient"
PART = Part(
    "experts",
    visible=((2, (ONE, SINGLE)), (3, (ONE,)), (2, ()), (4, ())),
    hidden=(
        (TWO_GROUPS,),
        ("an expert that all tokens choose",),
        (IDLE,),
        (IDLE, NO_GRADIENT),
        (EMPTY,),
        (EMPTY, ONE),
        ("frozen experts", "a transposed input"),
        ("float32", SINGLE),
        ("two forwards before a backward",),
        (TWO_GROUPS, EMPTY, IDLE),
    ),
    extra=("an expert that all tokens choose", EMPTY, "a transposed input", SINGLE),
)


class Sizes:
    """Sizes of a case: experts of a rank and of all, experts of a token, hidden size."""

    def __init__(self, case: Case) -> None:
        random = case.make_rng("sizes")
        self.local = 1 if case.has_trait(SINGLE) else random.randint(2, 3)
        self.experts = self.local * case.size
        usable = self.experts - (self.local if case.has_trait(IDLE) else 0)
        self.k = 1 if case.has_trait(ONE) else min(usable, 2)
        self.hidden = random.randint(9, 13)


def make_experts(case: Case, copy: int, rank: int) -> list[nn.Module]:
    """Return the experts of a rank."""
    s, found = Sizes(case), []
    for number in range(rank * s.local, (rank + 1) * s.local):
        up = nn.Linear(s.hidden, s.hidden + 1, dtype=case.dtype)
        expert = nn.Sequential(up, nn.Tanh(), nn.Linear(s.hidden + 1, s.hidden, dtype=case.dtype))
        for name, p in expert.named_parameters():
            p.data.copy_(case.draw_normal(*p.shape, key=(copy, number, name)) / s.hidden**0.5)
        found.append(expert.requires_grad_(not case.has_trait("frozen experts")))
    return found


def draw_batch(case: Case, copy: int, rank: int, turn: int) -> tuple[Tensor, ...]:
    """Return a rank's rows, their experts, their weights, and their outputs' gradients."""
    s, random = Sizes(case), case.make_rng("batch", copy, rank, turn)
    tokens = 0 if case.has_trait(EMPTY) and rank == case.size - 1 else 5 + 2 * rank + turn
    idle = case.make_rng("idle").randrange(case.size) if case.has_trait(IDLE) else None
    usable = [e for e in range(s.experts) if e // s.local != idle]
    rows = [random.sample(usable, s.k) for _ in range(tokens)]
    if case.has_trait("an expert that all tokens choose"):
        rows = [[usable[-1], *(e for e in row if e != usable[-1])][: s.k] for row in rows]
    chosen = torch.tensor(rows, dtype=torch.int64).view(tokens, s.k)
    key = copy, rank, turn
    x = case.draw_normal(tokens, s.hidden, key=(*key, "x"))
    if case.has_trait("a transposed input"):
        x = x.t().contiguous().t()
    weights = case.draw_normal(tokens, s.k, key=(*key, "weights")).requires_grad_()
    gradient = case.draw_normal(tokens, s.hidden, key=(*key, "gradient"))
    return x.requires_grad_(not case.has_trait(NO_GRADIENT)), chosen, weights, gradient


def find_gradients(tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return each tensor's gradient; where one is wanted, None is as good as zeros."""
    zeros = {name: torch.zeros_like(t) for name, t in tensors.items() if t.requires_grad}
    return {n: zeros.get(n) if t.grad is None else t.grad for n, t in tensors.items()}


def check_engine(engine: ModuleType, case: Case, copy: int, group: dist.ProcessGroup) -> None:
    """Run forward and backward, beside all experts and all tokens in this process."""
    s, n, rank = Sizes(case), case.size, group.rank()
    turns = 2 if case.has_trait("two forwards before a backward") else 1
    mine, calls = make_experts(case, copy, rank), Counter[int]()
    for number, expert in enumerate(mine):
        expert.register_forward_hook(lambda *_, number=number: calls.update([number]))
    layer, traffic = engine.ExpertParallel(mine, group), Traffic(group)
    batches = [draw_batch(case, copy, rank, turn) for turn in range(turns)]
    with count.record_traffic() as sent:
        outputs = [layer(x, chosen, weights) for x, chosen, weights, _ in batches]
        pairs = zip(outputs, batches, strict=True)
        sum((y * gradient).sum() for y, (*_, gradient) in pairs).backward()
    traffic.add_sent(sent)
    most = max(calls.values(), default=0)
    assert most <= turns, f"calls one expert {most} times in {turns} forwards"

    everyone = [make_experts(case, copy, r) for r in range(n)]
    flat = [expert for one in everyone for expert in one]
    own = other = 0.0  # rows that this rank sends to experts, and rows that its experts receive
    for turn in range(turns):
        for source in range(n):
            x, chosen, weights, gradient = draw_batch(case, copy, source, turn)
            y = torch.zeros_like(x)
            for token, row in enumerate(chosen.tolist()):
                terms = [weights[token, j] * flat[e](x[token]) for j, e in enumerate(row)]
                y[token] = sum(terms).detach()
                (sum(terms) * gradient[token]).sum().backward()
            here = int((chosen // s.local == rank).sum())
            other += here * (n - 1) / n if source == rank else here
            if source == rank:
                # A ring's all-to-all counts (n - 1) / n of the rows, wherever they go.
                own += max(chosen.numel() - here, (n - 1) / n * chosen.numel())
                mine_x, _, mine_weights, _ = batches[turn]
                check_values(f"turn {turn}", {"output": outputs[turn]}, {"output": y}, case)
                got = find_gradients({"input": mine_x, "weights": mine_weights})
                want = find_gradients({"input": x, "weights": weights})
                check_values(f"turn {turn}: the gradient of", got, want, case)
    for number, (expert, right) in enumerate(zip(mine, everyone[rank], strict=True)):
        got, want = (find_gradients(dict(one.named_parameters())) for one in (expert, right))
        check_values(f"the gradient of local expert {number}'s", got, want, case)

    back = 0 if case.has_trait(NO_GRADIENT) and case.has_trait("frozen experts") else 1
    ways = 1 if case.has_trait(NO_GRADIENT) else 2
    rows = own * (1 + back) + other * ways  # sent rows and gradients; returned rows and gradients
    numbers = 8 * (own + other) + 16 * n * s.experts * turns
    traffic.check_limits(rows * s.hidden * case.dtype.itemsize + numbers, turns * (4 * n + 6))


def test_experts(on_ranks):
    """Compute as all experts in one process."""
    on_ranks(check_engine)
