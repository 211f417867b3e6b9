"""Part 4: a step of a pipeline, in the order 1F1B."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.measure import count

from .core import FLOAT32, TWO_GROUPS, Budget, Case, Part, Seen, Values, note

FEW = "fewer micro-batches than stages"
MANY = "many micro-batches"
UNEVEN = "a short last micro-batch"
TOKENS = "tokens as inputs"
FROZEN = "a frozen first stage"
ALL_FROZEN = "frozen stages but for the last one"
TRANSPOSED = "an output that is transposed"
WIDE = "micro-batches of three dimensions"
KEPT = "gradients that are there already"
EMPTY = "a stage without parameters"
TWICE = "two steps"
VOCAB = 11


class Stage(nn.Module):
    """A part of the model."""

    def __init__(self, case: Case, copy: int, stage: int) -> None:
        super().__init__()
        self.transposed = case.has(TRANSPOSED)
        self.embedding = self.linear = None
        width = shapes(case)[0][-1]
        if case.has(TOKENS) and stage == 0:
            self.embedding = nn.Embedding(VOCAB, width, dtype=case.dtype)
        if not (case.has(EMPTY) and stage == case.size - 2):
            self.linear = nn.Linear(width, width, dtype=case.dtype)
        for name, p in self.named_parameters():
            p.data.copy_(case.normal(*p.shape, key=(copy, stage, name)) / width**0.5)
            if case.has(KEPT):
                p.grad = case.normal(*p.shape, key=(copy, stage, name, "grad"))
        frozen = case.has(FROZEN) and stage == 0
        if frozen or (case.has(ALL_FROZEN) and stage < case.size - 1):
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """What goes to the next stage."""
        x = self.embedding(x) if self.embedding else x
        x = x + self.linear(x).tanh() if self.linear else x.sin()
        return x.transpose(0, -1).contiguous().transpose(0, -1) if self.transposed else x


def shapes(case: Case) -> list[tuple[int, ...]]:
    """Of each micro-batch."""
    random, n = case.random("shapes"), case.size
    number = random.randint(n + 1, n + 3)
    if case.has(FEW):
        number = max(1, n - 2)
    elif case.has(MANY):
        number = 3 * n + 1
    width, samples = random.randint(5, 9), random.randint(3, 5)
    inner = (2,) if case.has(WIDE) else ()
    found = [(samples, *inner, width)] * number
    return [*found[:-1], (samples - 2, *inner, width)] if case.has(UNEVEN) else found


def batches(case: Case, copy: int, step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of all micro-batches."""
    inputs, targets = [], []
    for i, shape in enumerate(shapes(case)):
        x = case.normal(*shape, key=(copy, step, "x", i))
        if case.has(TOKENS):
            x = (x[..., 0].abs() * 7).long() % VOCAB
        inputs.append(x)
        targets.append(case.normal(*shape, key=(copy, step, "y", i)))
    return inputs, targets


def steps(case: Case) -> int:
    """Of a run."""
    return 2 if case.has(TWICE) else 1


def loss(output: Tensor, target: Tensor) -> Tensor:
    """A micro-batch's part of a sum."""
    return (output - target).square().sum() / 10


class Watch:
    """How many micro-batches of a stage are between their forward and their backward, at most."""

    def __init__(self, stage: nn.Module) -> None:
        self.now = self.most = self.calls = 0
        self.order = ""  # F and B: forwards that have a backward, and these
        stage.register_forward_hook(self.forward)

    def forward(self, _: nn.Module, inputs: object, output: Tensor) -> None:
        """Count it in, and out once its gradient is there."""
        self.calls += 1
        if output.requires_grad:
            self.now += 1
            self.order += "F"
            self.most = max(self.most, self.now)
            output.register_hook(self.back)

    def back(self, gradient: Tensor) -> None:
        """Backward has come so far."""
        self.now -= 1
        self.order += "B"


def one_f_one_b(ahead: int, m: int) -> str:
    """The order of a stage that runs so many forwards ahead."""
    ahead = min(ahead, m)
    return "F" * ahead + "FB" * (m - ahead) + "B" * ahead


def work(engine: ModuleType, case: Case, copy: int, group: dist.ProcessGroup) -> Seen:
    """Steps of the engine; gradients add up."""
    rank, n, m = group.rank(), group.size(), len(shapes(case))
    stage = Stage(case, copy, rank)
    watch, seen = Watch(stage), Seen({})
    for step in range(steps(case)):
        inputs, targets = batches(case, copy, step)
        first, last = inputs if rank == 0 else None, targets if rank == n - 1 else None
        with count.sent() as sent:
            value = engine.train_step(stage, group, shapes(case), case.dtype, first, last, loss)
        note(seen, sent, group)
        if sent.calls:
            seen.wrong = seen.wrong or f"calls {' and '.join(sent.calls)}: messages are enough"
        if isinstance(value, Tensor) and value.requires_grad:
            seen.wrong = seen.wrong or "returns a loss that keeps its graph"
        seen.values |= _values(step, rank, stage, value)
    if watch.calls != m * steps(case):
        seen.wrong = seen.wrong or f"calls its stage {watch.calls} times, not {m * steps(case)}"
    if watch.most > n - rank:
        seen.wrong = seen.wrong or (
            f"has {watch.most} micro-batches between forward and backward at once, where "
            f"1F1B has {n - rank}"
        )
    if watch.order not in ("", one_f_one_b(n - 1 - rank, m) * steps(case)):
        seen.wrong = seen.wrong or (
            f"runs its forwards and backwards in the order {watch.order}, which is not 1F1B"
        )
    return seen


def _values(step: int, rank: int, stage: nn.Module, value: Tensor | None) -> Values:
    found: Values = {f"in step {step + 1} the loss": value}
    for name, p in stage.named_parameters():
        key = f"in step {step + 1} the gradient of stage {rank}'s `{name}`"
        found[key] = None if p.grad is None else p.grad.clone()
    return found


def right(case: Case, copy: int) -> list[Values]:
    """All stages in one process."""
    stages = [Stage(case, copy, stage) for stage in range(case.size)]
    found: list[Values] = [{} for _ in stages]
    for step in range(steps(case)):
        total = torch.zeros((), dtype=case.dtype)
        for x, y in zip(*batches(case, copy, step), strict=True):
            for stage in stages:
                x = stage(x)
            value = loss(x, y)
            value.backward()
            total += value.detach()
        for rank, stage in enumerate(stages):
            last = rank == case.size - 1
            found[rank] |= _values(step, rank, stage, total if last else None)
    return found


def budget(case: Case, copy: int, rank: int) -> Budget:
    """A message each way for each micro-batch, from the stages that have a neighbour there."""
    ways = (rank > 0) + (rank < case.size - 1)
    size = sum(torch.Size(shape).numel() for shape in shapes(case)) * case.dtype.itemsize
    return Budget(steps(case) * ways * size, steps(case) * ways * len(shapes(case)))


PART = Part(
    "pipeline",
    ("train_step",),
    visible=((2, ()), (4, (FEW,)), (2, (TOKENS,)), (4, (MANY,))),
    hidden=(
        (TWO_GROUPS,),
        (FEW,),
        (UNEVEN, MANY),
        (FROZEN, TOKENS),
        (ALL_FROZEN,),
        (TRANSPOSED,),
        (WIDE, FLOAT32),
        (KEPT, TWICE),
        (EMPTY,),
        (TWO_GROUPS, TOKENS, UNEVEN),
    ),
    extra=(TOKENS, FROZEN, UNEVEN, WIDE, TRANSPOSED),
    work=work,
    right=right,
    budget=budget,
)
