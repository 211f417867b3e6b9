"""Part 1: copies of a module, and the average of their gradients."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.measure import count

from .core import FLOAT32, TWO_GROUPS, Budget, Case, Part, Seen, Values, note

FROZEN = "a frozen layer"
TIED = "tied weights"
MIXED = "float32 beside float64"
BUFFERS = "buffers"
ONE_USES = "a layer that one rank uses"
NOBODY_USES = "a layer that nobody uses"
TRANSPOSED = "a transposed weight"
SMALL = "small buckets"
MANY = "many small layers"
MICRO = "micro-batches"
UNEVEN = "unequal batches"
EMPTY = "a rank without samples"
ZEROED = "gradients set to zero, not None"
STEPS = 2


class Model(nn.Module):
    """Layers in a row, with what the case's traits add."""

    def __init__(self, case: Case, copy: int, rank: int) -> None:
        super().__init__()
        random = case.random("sizes")
        width, depth = random.randint(9, 15), random.randint(3, 5)
        if case.has(MANY) or case.has(SMALL):
            depth = 10  # of fewer layers a bucket of any size may hold most
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.spare = (
            nn.Linear(width, width) if case.has(ONE_USES) or case.has(NOBODY_USES) else None
        )
        self.wide = nn.Linear(width, width) if case.has(MIXED) else None
        if case.has(TRANSPOSED):
            self.skew = nn.Parameter(torch.zeros(width + 1, width).t())
        if case.has(BUFFERS):
            self.register_buffer("scale", torch.zeros(width))
            self.register_buffer("seen", torch.tensor(0))
        self.to(case.dtype)
        if self.wide:
            self.wide.to(torch.float32)
        if case.has(TIED):
            self.layers[-1].weight = self.layers[0].weight
        if case.has(FROZEN):
            self.layers[random.randrange(1, depth - 1)].requires_grad_(False)
        with torch.no_grad():
            for name, p in self.named_parameters():
                key = "weights", copy, rank, name
                p.copy_(case.normal(*p.shape, key=key) / width**0.5)
            for name, b in self.named_buffers():
                b.copy_(10 * case.normal(*b.shape, key=("buffers", copy, rank, name)))

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        """A loss for each sample."""
        for layer in self.layers:
            x = x + layer(x).tanh()  # [samples, width]
        if self.wide:
            x = x + self.wide(x.float()).to(x.dtype)
        if hasattr(self, "skew"):
            x = torch.cat([x, x @ self.skew], 1)
        if hasattr(self, "scale"):
            x = x + self.scale.sum() / 10 + self.seen
        return x.sum(1).cos() + (self.spare(x[:, : self.spare.in_features]).sum(1) if spare else 0)


def micro(case: Case) -> int:
    """Micro-batches of a step."""
    return 3 if case.has(MICRO) else 1


def uses(case: Case, rank: int) -> bool:
    """Whether a rank uses the spare layer."""
    return case.has(ONE_USES) and rank == case.random("user").randrange(case.size)


def batch(case: Case, copy: int, rank: int, step: int, part: int) -> Tensor:
    """A micro-batch of a rank."""
    samples = 4
    if case.has(UNEVEN):
        samples = 1 + (3 * rank + 2 * step) % 5
    if case.has(EMPTY):
        samples = 0 if rank == (step + 1) % case.size else rank + 2
    width = case.random("sizes").randint(9, 15)
    return case.normal(samples, width, key=("batch", copy, rank, step, part))


def joined(case: Case) -> bool:
    """Whether the ranks' batches differ in size."""
    return case.has(UNEVEN) or case.has(EMPTY)


def work(engine: ModuleType, case: Case, copy: int, group: dist.ProcessGroup) -> Seen:
    """Some steps of SGD through the engine."""
    rank = group.rank()
    module = Model(case, copy, rank)
    kept = dict(module.named_parameters())
    sizes = trained(module)
    limit = bucket(case, sizes)
    model = engine.DataParallel(module, group, limit)
    seen = Seen({f"at the start `{name}`": t.clone() for name, t in module.state_dict().items()})
    if any(kept[name] is not p for name, p in module.named_parameters()):
        seen.wrong = "has other parameters than the module was made with"
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    fewest = None
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not case.has(ZEROED))
        with count.sent() as early:
            for part in range(micro(case) - 1):
                with model.no_sync():
                    _loss(
                        engine, case, model, group, batch(case, copy, rank, step, part)
                    ).backward()
        if early.calls or early.messages:
            seen.wrong = seen.wrong or "sends something inside of no_sync"
        with count.sent() as joining:
            x = batch(case, copy, rank, step, micro(case) - 1)
            value = _loss(engine, case, model, group, x)
        with count.sent() as sent:
            value.backward()
            model.finish()
        if (extra := joining.payload.total() + joining.bytes) > 64:
            seen.wrong = seen.wrong or (
                f"sends {extra:.0f} bytes in forward and to join the losses: a count is enough"
            )
        note(seen, sent, group)
        calls = sum(sent.calls.values()) + sent.messages
        fewest = calls if fewest is None else min(calls, fewest)
        seen.values |= _values(module, step, optimizer)
    if fewest < sum(sizes) / max(limit, *sizes):
        seen.wrong = seen.wrong or (
            f"sends all gradients in {fewest} call{'s' * (fewest > 1)}: their tensors are larger "
            "than bucket_bytes"
        )
    return seen


def _loss(
    engine: ModuleType, case: Case, model: object, group: dist.ProcessGroup, x: Tensor
) -> Tensor:
    losses = model(x, uses(case, group.rank()))
    if joined(case):
        return engine.joined_loss(losses.sum(), len(x), group)
    return losses.mean() / micro(case)


def _values(module: nn.Module, step: int, optimizer: torch.optim.Optimizer) -> Values:
    found: Values = {}
    for name, p in module.named_parameters():
        gradient = None if p.grad is None else p.grad.clone()
        found[f"in step {step + 1} the gradient of `{name}`"] = gradient
    optimizer.step()
    for name, p in module.named_parameters():
        found[f"after step {step + 1} `{name}`"] = p.detach().clone()
    return found


def right(case: Case, copy: int) -> list[Values]:
    """One process, with the weights of the first rank and the batches of all."""
    module = Model(case, copy, 0)
    found: Values = {f"at the start `{name}`": t.clone() for name, t in module.state_dict().items()}
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not case.has(ZEROED))
        for part in range(micro(case)):
            batches = [batch(case, copy, rank, step, part) for rank in range(case.size)]
            losses = [module(x, uses(case, rank)) for rank, x in enumerate(batches)]
            if joined(case):
                value = sum(x.sum() for x in losses) / sum(map(len, batches))
            else:
                value = sum(x.mean() for x in losses) / case.size / micro(case)
            value.backward()
        found |= _values(module, step, optimizer)
    return [found] * case.size


def trained(module: nn.Module) -> list[int]:
    """Bytes of each parameter that is trained."""
    return [p.nbytes for p in module.parameters() if p.requires_grad]


def bucket(case: Case, sizes: list[int]) -> int:
    """bucket_bytes: all gradients in one, or in six and more."""
    return max(*sizes, sum(sizes) // 6) if case.has(SMALL) else 2**20


def budget(case: Case, copy: int, rank: int) -> Budget:
    """Of all steps: a ring all-reduce of what is trained, and flags."""
    sizes, n = trained(Model(case, copy, rank)), case.size
    buckets = 2 * sum(sizes) // bucket(case, sizes) + 1 + case.has(MIXED)
    rounded, flags = sum(sizes) + 8 * n * buckets, 8 * n * len(sizes) + 64
    return Budget(STEPS * (2 * (n - 1) / n * rounded + flags), STEPS * (2 * buckets + 5))


PART = Part(
    "data_parallel",
    ("DataParallel", "joined_loss"),
    visible=((2, ()), (3, (FROZEN,)), (2, (MICRO,)), (3, (UNEVEN,))),
    hidden=(
        (TWO_GROUPS, BUFFERS),
        (ONE_USES,),
        (NOBODY_USES,),
        (TIED, FROZEN),
        (MIXED,),
        (TRANSPOSED, FLOAT32),
        (SMALL, FROZEN),
        (MANY,),
        (MICRO, ONE_USES, ZEROED),
        (EMPTY, TWO_GROUPS),
    ),
    extra=(BUFFERS, FROZEN, TIED, TRANSPOSED, ZEROED),
    work=work,
    right=right,
    budget=budget,
)
