"""Part 4: one step of a pipeline in the order 1F1B."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.measure import count

from .core import TWO_GROUPS, Case, Part, Traffic, check_values, get_gradients

VOCAB = 11
FEW, MANY = "fewer micro-batches than stages", "many micro-batches"
TOKENS, UNEVEN = "tokens as inputs", "a short last micro-batch"
PART = Part(
    "pipeline",
    visible=((2, ()), (4, (FEW,)), (2, (TOKENS,)), (4, (MANY,))),
    hidden=(
        (TWO_GROUPS,),
        (FEW,),
        (UNEVEN, MANY),
        ("a frozen first stage", TOKENS),
        ("frozen stages but for the last one",),
        ("an output that is transposed",),
        ("micro-batches of three dimensions", "float32"),
        ("gradients that are there already", "two steps"),
        ("a stage without parameters",),
        (TWO_GROUPS, TOKENS, UNEVEN),
    ),
    extra=(TOKENS, UNEVEN, "a frozen first stage", "an output that is transposed"),
)


class Stage(nn.Module):
    """One stage of the model."""

    def __init__(self, case: Case, copy: int, stage: int) -> None:
        super().__init__()
        self.transposed = case.has_trait("an output that is transposed")
        self.embedding = self.linear = None
        width = draw_shapes(case)[0][-1]
        if case.has_trait(TOKENS) and stage == 0:
            self.embedding = nn.Embedding(VOCAB, width, dtype=case.dtype)
        if not (case.has_trait("a stage without parameters") and stage == case.size - 2):
            self.linear = nn.Linear(width, width, dtype=case.dtype)
        for name, p in self.named_parameters():
            p.data.copy_(case.draw_normal(*p.shape, key=(copy, stage, name)) / width**0.5)
            if case.has_trait("gradients that are there already"):
                p.grad = case.draw_normal(*p.shape, key=(copy, stage, name, "grad"))
        most = case.has_trait("frozen stages but for the last one") and stage < case.size - 1
        if most or (case.has_trait("a frozen first stage") and stage == 0):
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of this stage."""
        x = self.embedding(x) if self.embedding else x
        x = x + self.linear(x).tanh() if self.linear else x.sin()
        return x.transpose(0, -1).contiguous().transpose(0, -1) if self.transposed else x


def draw_shapes(case: Case) -> list[tuple[int, ...]]:
    """Return the shape of each micro-batch."""
    random, n = case.make_rng("shapes"), case.size
    number = random.randint(n + 1, n + 3)
    if case.has_trait(FEW):
        number = max(1, n - 2)
    elif case.has_trait(MANY):
        number = 3 * n + 1
    width, samples = random.randint(5, 9), random.randint(3, 5)
    inner = (2,) if case.has_trait("micro-batches of three dimensions") else ()
    found = [(samples, *inner, width)] * number
    return [*found[:-1], (samples - 2, *inner, width)] if case.has_trait(UNEVEN) else found


def draw_batches(case: Case, copy: int, step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs and targets of all micro-batches."""
    inputs, targets = [], []
    for i, shape in enumerate(draw_shapes(case)):
        x = case.draw_normal(*shape, key=(copy, step, "x", i))
        inputs.append((x[..., 0].abs() * 7).long() % VOCAB if case.has_trait(TOKENS) else x)
        targets.append(case.draw_normal(*shape, key=(copy, step, "y", i)))
    return inputs, targets


def compute_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return a micro-batch's part of the step's loss."""
    return (output - target).square().sum() / 10


def check_engine(engine: ModuleType, case: Case, copy: int, group: dist.ProcessGroup) -> None:
    """Run steps of the engine, beside all stages in this process."""
    rank, n, shapes = group.rank(), group.size(), draw_shapes(case)
    stage, stages = Stage(case, copy, rank), [Stage(case, copy, i) for i in range(n)]
    m, steps = len(shapes), 2 if case.has_trait("two steps") else 1
    order: list[str] = []  # forwards that have a backward (F), and backwards (B)
    calls: list[int] = []

    def note_forward(_: nn.Module, inputs: object, output: Tensor) -> None:
        calls.append(1)
        if output.requires_grad:
            order.append("F")
            output.register_hook(lambda gradient: order.append("B"))

    stage.register_forward_hook(note_forward)
    traffic = Traffic(group)
    for step in range(steps):
        inputs, targets = draw_batches(case, copy, step)
        first, last = inputs if rank == 0 else None, targets if rank == n - 1 else None
        with count.record_traffic() as sent:
            loss = engine.train_step(stage, group, shapes, case.dtype, first, last, compute_loss)
        traffic.add_sent(sent)
        assert not sent.calls, f"calls {' and '.join(sent.calls)}: messages are enough"
        graph = isinstance(loss, Tensor) and loss.requires_grad
        assert not graph, "returns a loss that keeps its graph"
        total = torch.zeros((), dtype=case.dtype)
        for x, target in zip(inputs, targets, strict=True):
            for one in stages:
                x = one(x)
            one_loss = compute_loss(x, target)
            one_loss.backward()
            total += one_loss.detach()
        want = {"the loss": total if rank == n - 1 else None}
        check_values(f"in step {step + 1}", {"the loss": loss}, want, case)
        got, want = (get_gradients(**dict(one.named_parameters())) for one in (stage, stages[rank]))
        check_values(f"in step {step + 1} the gradient of stage {rank}'s", got, want, case)
    assert len(calls) == m * steps, f"calls its stage {len(calls)} times, not {m * steps}"
    ahead = min(n - 1 - rank, m)
    right = ("F" * ahead + "FB" * (m - ahead) + "B" * ahead) * steps
    assert "".join(order) in ("", right), f"runs in the order {''.join(order)}, not {right}"
    neighbours = (rank > 0) + (rank < n - 1)
    size = sum(torch.Size(shape).numel() for shape in shapes) * case.dtype.itemsize
    traffic.check_limits(steps * neighbours * size, steps * neighbours * m)


def test_pipeline(on_ranks):
    """Train as all stages in one process, in the order 1F1B."""
    on_ranks(check_engine)
