"""Part 2: an optimizer whose states are cut."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.measure import count

from .core import FLOAT32, TWO_GROUPS, Budget, Case, Part, Seen, Values, note

FROZEN = "a frozen parameter"
CLIPPED = "clipped gradients"
LOOSE = "a norm below the limit"
MISSING = "a gradient that one rank has"
NONE = "a gradient that no rank has"
MOMENTUM = "SGD with momentum"
MIXED = "float32 beside float64"
TINY = "a parameter of one number"
TRANSPOSED = "a transposed parameter"
RATE = "another learning rate after a step"
STEPS = 3


def parameters(case: Case, copy: int) -> dict[str, nn.Parameter]:
    """The same on all ranks; sizes that no number of ranks divides."""
    random = case.random("sizes")
    shapes = [(random.randint(9, 15), random.randint(9, 15)) for _ in range(random.randint(2, 4))]
    shapes += [(random.choice((7, 11, 13)),)]
    if case.has(TINY):
        shapes.insert(1, (1,))
    found = {}
    for i, shape in enumerate(shapes):
        dtype = torch.float32 if case.has(MIXED) and i % 2 else case.dtype
        whole = case.normal(*shape, key=("weights", copy, i), dtype=dtype)
        if case.has(TRANSPOSED) and len(shape) == 2:
            whole = whole.t().contiguous().t()
        found[f"p{i}"] = nn.Parameter(whole, requires_grad=not (case.has(FROZEN) and i == 1))
    return found


def gradient(case: Case, copy: int, rank: int, step: int, name: str, like: Tensor) -> Tensor | None:
    """A rank's own."""
    if not like.requires_grad or (case.has(NONE) and name == "p0" and step != 1):
        return None
    if case.has(MISSING) and name == "p0" and rank != step % case.size:
        return None
    return case.normal(*like.shape, key=("gradient", copy, rank, step, name), dtype=like.dtype)


def make(case: Case, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """The plain optimizer; with weight decay, so that zeros are no nothing."""
    if case.has(MOMENTUM):
        return torch.optim.SGD(tensors, 0.1, momentum=0.9, weight_decay=0.1)
    # eps: a gradient that is 0 but for rounding moves nothing
    return torch.optim.AdamW(tensors, 0.01, eps=1e-3, weight_decay=0.1)


def limit(case: Case) -> float | None:
    """max_norm."""
    return 1.0 if case.has(CLIPPED) else 1e4 if case.has(LOOSE) else None


def work(engine: ModuleType, case: Case, copy: int, group: dist.ProcessGroup) -> Seen:
    """Some steps of the engine's optimizer on gradients of the case's."""
    rank, mine = group.rank(), parameters(case, copy)
    made: list[torch.optim.Optimizer] = []

    def plain(tensors: list[Tensor]) -> torch.optim.Optimizer:
        made.append(make(case, list(tensors)))
        return made[-1]

    optimizer = engine.ZeroOptimizer(iter(mine.values()), group, plain)
    seen = Seen({})
    for step in range(STEPS):
        for name, p in mine.items():
            p.grad = gradient(case, copy, rank, step, name, p)
        if case.has(RATE) and step == 1:
            for part in [part for one in made for part in one.param_groups]:
                part["lr"] /= 4
        with count.sent() as sent:
            norm = optimizer.step(limit(case))
        note(seen, sent, group)
        if norm is not None:
            norm = torch.tensor(float(norm), dtype=torch.float64)
        seen.values[f"in step {step + 1} the norm"] = norm
        for name, p in mine.items():
            seen.values[f"after step {step + 1} `{name}`"] = p.detach().clone()
        optimizer.zero_grad()
        if any(p.grad is not None for p in mine.values()):
            seen.wrong = "has gradients after zero_grad"
    states = [s for one in made for held in one.state.values() for s in held.values()]
    held = sum(s.numel() for s in states if isinstance(s, Tensor) and s.dim())
    if held > (allowed := states_allowed(case, mine)):
        seen.wrong = seen.wrong or f"holds {held} numbers of states, where its share has {allowed}"
    return seen


def states_allowed(case: Case, mine: dict[str, nn.Parameter]) -> int:
    """Numbers: two states of AdamW for each number of the share, one of SGD with momentum."""
    share = sum(-(-p.numel() // case.size) for p in mine.values() if p.requires_grad)
    return share * (1 if case.has(MOMENTUM) else 2)


def right(case: Case, copy: int) -> list[Values]:
    """One optimizer with all states, on the averages."""
    mine = parameters(case, copy)
    trained = {name: p for name, p in mine.items() if p.requires_grad}
    optimizer = make(case, list(trained.values()))
    found: Values = {}
    for step in range(STEPS):
        for name, p in trained.items():
            each = [gradient(case, copy, r, step, name, p) for r in range(case.size)]
            total = sum((g for g in each if g is not None), torch.zeros_like(p))
            p.grad = total / case.size
        if case.has(RATE) and step == 1:
            optimizer.param_groups[0]["lr"] /= 4
        norm = None
        if (most := limit(case)) is not None:
            norm = torch.stack([p.grad.double().square().sum() for p in trained.values()]).sum()
            norm = norm.sqrt().detach()
            for p in trained.values():
                p.grad *= min(1.0, most / (norm.item() + 1e-6))
        optimizer.step()
        found[f"in step {step + 1} the norm"] = norm
        for name, p in mine.items():
            found[f"after step {step + 1} `{name}`"] = p.detach().clone()
    return [found] * case.size


def budget(case: Case, copy: int, rank: int) -> Budget:
    """Of all steps: gradients reduced and scattered, weights gathered, a norm added up."""
    trained = [p for p in parameters(case, copy).values() if p.requires_grad]
    n = case.size
    whole = sum(p.element_size() * n * -(-p.numel() // n) for p in trained)
    calls = 2 * len(trained) + 2
    return Budget(STEPS * (2 * (n - 1) / n * whole + 64), STEPS * calls)


PART = Part(
    "zero",
    ("ZeroOptimizer",),
    visible=((2, ()), (3, ()), (2, (CLIPPED,)), (3, (FROZEN,))),
    hidden=(
        (TWO_GROUPS,),
        (TWO_GROUPS, CLIPPED),
        (MISSING,),
        (NONE,),
        (MIXED,),
        (TINY, MOMENTUM),
        (TRANSPOSED,),
        (LOOSE, FROZEN),
        (FLOAT32, MOMENTUM, CLIPPED),
        (RATE, CLIPPED),
    ),
    extra=(FROZEN, TINY, MISSING, TRANSPOSED, MOMENTUM),
    work=work,
    right=right,
    budget=budget,
)
