"""Part 2: an optimizer whose states are sharded."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.measure import count

from .core import TWO_GROUPS, Case, Part, Traffic, check_values

STEPS = 3
PART = Part(
    "zero",
    visible=((2, ()), (3, ()), (2, ("clipped gradients",)), (3, ("a frozen parameter",))),
    hidden=(
        (TWO_GROUPS,),
        (TWO_GROUPS, "clipped gradients"),
        ("a gradient that one rank has",),
        ("a gradient that no rank has",),
        ("float32 beside float64",),
        ("a parameter of one number", "SGD with momentum"),
        ("a transposed parameter",),
        ("a norm below the limit", "a frozen parameter"),
        ("float32", "SGD with momentum", "clipped gradients"),
        ("another learning rate after a step", "clipped gradients"),
    ),
    extra=("a frozen parameter", "a gradient that one rank has", "a transposed parameter"),
)


def make_parameters(case: Case, copy: int) -> dict[str, nn.Parameter]:
    """Return parameters, the same on all ranks, whose sizes no number of ranks divides."""
    random = case.make_rng("sizes")
    shapes = [(random.randint(9, 15), random.randint(9, 15)) for _ in range(random.randint(2, 4))]
    shapes += [(random.choice((7, 11, 13)),)]
    if case.has_trait("a parameter of one number"):
        shapes.insert(1, (1,))
    found = {}
    for i, shape in enumerate(shapes):
        mixed = case.has_trait("float32 beside float64") and i % 2
        dtype = torch.float32 if mixed else case.dtype
        whole = case.draw_normal(*shape, key=("weights", copy, i), dtype=dtype)
        if case.has_trait("a transposed parameter") and len(shape) == 2:
            whole = whole.t().contiguous().t()
        frozen = case.has_trait("a frozen parameter") and i == 2  # float64, if both dtypes occur
        found[f"p{i}"] = nn.Parameter(whole, requires_grad=not frozen)
    return found


def draw_gradient(
    case: Case, copy: int, rank: int, step: int, name: str, p: Tensor
) -> Tensor | None:
    """Return a rank's own gradient of a parameter."""
    if not p.requires_grad:
        return None
    if case.has_trait("a gradient that no rank has") and name == "p0" and step != 1:
        return None
    if case.has_trait("a gradient that one rank has") and name == "p0" and rank != step % case.size:
        return None
    return case.draw_normal(*p.shape, key=("gradient", copy, rank, step, name), dtype=p.dtype)


def check_engine(engine: ModuleType, case: Case, copy: int, group: dist.ProcessGroup) -> None:
    """Step the engine's optimizer, beside one that has all states and the averages."""
    n, rank = case.size, group.rank()
    mine, whole = make_parameters(case, copy), make_parameters(case, copy)
    trained = {name: p for name, p in whole.items() if p.requires_grad}
    max_norm = 1.0 if case.has_trait("clipped gradients") else None
    max_norm = 1e4 if case.has_trait("a norm below the limit") else max_norm
    made: list[torch.optim.Optimizer] = []

    def make_optimizer(tensors: list[Tensor]) -> torch.optim.Optimizer:
        # With weight decay, so that padding and missing gradients matter. eps is so large that
        # gradients which are zero up to rounding move nothing.
        if case.has_trait("SGD with momentum"):
            made.append(torch.optim.SGD(tensors, 0.1, momentum=0.9, weight_decay=0.1))
        else:
            made.append(torch.optim.AdamW(tensors, 0.01, eps=1e-3, weight_decay=0.1))
        return made[-1]

    plain = make_optimizer(list(trained.values()))
    optimizer = engine.ZeroOptimizer(iter(mine.values()), group, make_optimizer)
    traffic = Traffic(group)
    for step in range(STEPS):
        for name, p in mine.items():
            p.grad = draw_gradient(case, copy, rank, step, name, p)
        for name, p in trained.items():
            each = [draw_gradient(case, copy, r, step, name, p) for r in range(n)]
            p.grad = sum((g for g in each if g is not None), torch.zeros_like(p)) / n
        if case.has_trait("another learning rate after a step") and step == 1:
            for part in [part for one in made for part in one.param_groups]:
                part["lr"] /= 4
        with count.record_traffic() as sent:
            norm = optimizer.step(max_norm)
        traffic.add_sent(sent)
        right_norm = None
        if max_norm is not None:
            right_norm = sum(p.grad.double().square().sum() for p in trained.values()).sqrt()
            for p in trained.values():
                p.grad *= min(1.0, max_norm / (right_norm.item() + 1e-6))
            assert norm is not None, "returns no norm"
            norm = torch.tensor(float(norm), dtype=torch.float64)
        plain.step()
        check_values(f"in step {step + 1}", {"the norm": norm}, {"the norm": right_norm}, case)
        check_values(f"after step {step + 1}", mine, whole, case)
        optimizer.zero_grad()
        assert all(p.grad is None for p in mine.values()), "has gradients after zero_grad"

    states = [s for one in made[1:] for held in one.state.values() for s in held.values()]
    held = sum(s.numel() for s in states if isinstance(s, Tensor) and s.dim())
    share = sum(-(-p.numel() // n) for p in trained.values())
    allowed = share * (1 if case.has_trait("SGD with momentum") else 2)
    assert held <= allowed, f"holds {held} numbers of states, where its share has {allowed}"
    size = sum(p.element_size() * n * -(-p.numel() // n) for p in trained.values())
    calls = 2 * len(trained) + 2
    traffic.check_limits(STEPS * (2 * (n - 1) / n * size + 64), STEPS * calls)


def test_zero(on_ranks):
    """Update as one optimizer that has all states."""
    on_ranks(check_engine)
