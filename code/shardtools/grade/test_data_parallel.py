"""Part 1: copies of a module, and the average of their gradients."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.measure import count

from .core import TWO_GROUPS, Case, Part, Traffic, check_values, get_gradients

STEPS = 2
PART = Part(
    "data_parallel",
    visible=((2, ()), (3, ("a frozen layer",)), (2, ("micro-batches",)), (3, ("unequal batches",))),
    hidden=(
        (TWO_GROUPS, "buffers"),
        ("a layer that one rank uses",),
        ("a layer that nobody uses",),
        ("tied weights", "a frozen layer"),
        ("float32 beside float64",),
        ("a transposed weight", "float32"),
        ("small buckets", "a frozen layer"),
        ("many small layers",),
        ("micro-batches", "a layer that one rank uses", "gradients set to zero, not None"),
        ("a rank without samples", TWO_GROUPS),
    ),
    extra=("buffers", "a frozen layer", "tied weights", "a transposed weight"),
)


class Model(nn.Module):
    """Residual layers, and the parts that the case's traits add."""

    def __init__(self, case: Case, copy: int, rank: int) -> None:
        super().__init__()
        random = case.make_rng("sizes")
        self.width, depth = random.randint(9, 15), random.randint(3, 5)
        width = self.width
        if case.has_trait("many small layers") or case.has_trait("small buckets"):
            depth = 10  # with fewer layers, one bucket of any size might hold most of them
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.spare = self.wide = self.skew = None
        if any(trait.startswith("a layer that") for trait in case.traits):
            self.spare = nn.Linear(width, width)
        if case.has_trait("a transposed weight"):
            self.skew = nn.Parameter(torch.zeros(width + 1, width).t())
        self.register_buffer("scale", torch.zeros(width) if case.has_trait("buffers") else None)
        self.to(case.dtype)
        if case.has_trait("float32 beside float64"):
            self.wide = nn.Linear(width, width)
        if case.has_trait("tied weights"):
            self.layers[-1].weight = self.layers[0].weight
        if case.has_trait("a frozen layer"):
            self.layers[random.randrange(1, depth - 1)].requires_grad_(False)
        for name, tensor in self.state_dict().items():
            tensor.copy_(case.draw_normal(*tensor.shape, key=(copy, rank, name)) / width**0.5)

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        """Return one loss per sample."""
        for layer in self.layers:
            x = x + layer(x).tanh()  # [samples, width]
        x = x if self.wide is None else x + self.wide(x.float()).to(x.dtype)
        x = x if self.scale is None else x + self.scale
        y = x.sum(1) if self.skew is None else x.sum(1) + (x @ self.skew).sum(1)
        return y.cos() + (self.spare(x).sum(1) if spare else 0)


def draw_batch(case: Case, copy: int, rank: int, step: int, part: int, width: int) -> Tensor:
    """Return a micro-batch of a rank: [samples, width]."""
    samples = 4
    if case.has_trait("unequal batches"):
        samples = 1 + (3 * rank + 2 * step) % 5
    if case.has_trait("a rank without samples"):
        samples = 0 if rank == (step + 1) % case.size else rank + 2
    return case.draw_normal(samples, width, key=("batch", copy, rank, step, part))


def check_engine(engine: ModuleType, case: Case, copy: int, group: dist.ProcessGroup) -> None:
    """Train with the engine, beside one process that has the batches of all ranks."""
    n, rank = case.size, group.rank()
    module, plain = Model(case, copy, rank), Model(case, copy, 0)
    kept = dict(module.named_parameters())
    sizes = [p.nbytes for p in module.parameters() if p.requires_grad]
    limit = max(*sizes, sum(sizes) // 6) if case.has_trait("small buckets") else 2**20
    micro = 3 if case.has_trait("micro-batches") else 1
    joined = case.has_trait("unequal batches") or case.has_trait("a rank without samples")
    one_uses = case.has_trait("a layer that one rank uses")
    user = case.make_rng("user").randrange(n) if one_uses else None

    model = engine.DataParallel(module, group, limit)
    check_values("at the start", module.state_dict(), plain.state_dict(), case)
    same = all(kept[name] is p for name, p in module.named_parameters())
    assert same, "has other parameters than the module was made with"
    both = [torch.optim.SGD(m.parameters(), 0.1) for m in (module, plain)]
    traffic = Traffic(group)

    def compute_loss(part: int) -> Tensor:
        x = draw_batch(case, copy, rank, step, part, plain.width)
        losses = model(x, rank == user)
        if joined:
            return engine.joined_loss(losses.sum(), len(x), group)
        return losses.mean() / micro

    for step in range(STEPS):
        for optimizer in both:
            optimizer.zero_grad(set_to_none=not case.has_trait("gradients set to zero, not None"))
        with count.record_traffic() as early:
            for part in range(micro - 1):
                with model.no_sync():
                    compute_loss(part).backward()
        assert not early.calls and not early.messages, "sends something inside of no_sync"
        with count.record_traffic() as joining:
            loss = compute_loss(micro - 1)
        extra = joining.payload.total() + joining.bytes
        assert extra <= 64, f"sends {extra} bytes in forward and to join the losses"
        with count.record_traffic() as sent:
            loss.backward()
            model.finish()
        traffic.add_sent(sent)
        calls = sum(sent.calls.values()) + sent.messages
        assert calls >= sum(sizes) / max(limit, *sizes), "sends tensors above bucket_bytes"
        for part in range(micro):
            xs = [draw_batch(case, copy, r, step, part, plain.width) for r in range(n)]
            losses = [plain(x, r == user) for r, x in enumerate(xs)]
            if joined:
                (sum(x.sum() for x in losses) / sum(map(len, xs))).backward()
            else:
                (sum(x.mean() for x in losses) / n / micro).backward()
        got, want = (get_gradients(**dict(m.named_parameters())) for m in (module, plain))
        check_values(f"in step {step + 1} the gradient of", got, want, case)
        for optimizer in both:
            optimizer.step()
        check_values(f"after step {step + 1}", module.state_dict(), plain.state_dict(), case)

    buckets = 2 * sum(sizes) // limit + 1 + case.has_trait("float32 beside float64")
    rounded, flags = sum(sizes) + 8 * n * buckets, 8 * n * len(sizes) + 64
    traffic.check_limits(STEPS * (2 * (n - 1) / n * rounded + flags), STEPS * (2 * buckets + 5))


def test_data_parallel(on_ranks):
    """Average gradients over ranks as one process does."""
    on_ranks(check_engine)
