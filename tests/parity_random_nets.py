"""Random right jobs around odd models: without a batch, rows that are alike, stages of any shape.

A seed draws a model of PIECES, a batch and an optimizer, and how a job splits them. Every loss is a
sum over tokens divided by their number, so that each split computes what the whole batch does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity_random import RULES
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import parallel as by_torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from shardlab import tensor_parallel as tp

H, VOCAB, LONG, IGNORED = 8, 13, 7, -100
AVERAGED = "DDP", "FSDP2", "ZeroRedundancyOptimizer"
BY_HAND = "loop", "ZeRO-1 by hand"


class Learned(nn.Module):
    """A parameter that is an output of its own, without a batch, and turned in memory."""

    def __init__(self, *shape: int):
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape[::-1]))

    def forward(self) -> Tensor:
        return (self.value * 1.5).t()


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric() -> nn.Module:
    made = nn.Linear(H, H)
    register_parametrization(made, "weight", Symmetric())
    return made


def numbers(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def queried(m: Any, x: Tensor, expands: bool) -> Tensor:
    made = m.made().expand(len(x), -1, -1) if expands else m.made()
    seen = (m.query(made) @ m.key(x).transpose(1, 2)).softmax(-1) @ x
    return x + seen.mean(1, keepdim=True)


def feed(m: Any, x: Tensor) -> Tensor:
    """Cut over tensor ranks where there are some."""
    group = getattr(m, "group", None)
    if group is None:
        return x + m.down(m.up(x).relu())
    return x + tp.reduce_from(m.down(m.up(tp.copy_to(x, group)).relu()), group)


def made(**modules: Callable[[], nn.Module]) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {name: make() for name, make in modules.items()}


def inner(make: Callable[..., nn.Module], *sizes: int, **more: Any) -> Callable[[], dict]:
    return lambda: {"inner": make(*sizes, **more)}


FEED = made(up=lambda: nn.Linear(H, 12), down=lambda: nn.Linear(12, H, bias=False))
QUERIES = made(
    made=lambda: Learned(3, H), key=lambda: nn.Linear(H, H), query=lambda: nn.Linear(H, H)
)
SCALED = made(scale=lambda: Learned(H), shift=lambda: Learned(1, H), factor=lambda: Learned(1))
# What a piece is made of, and what it does.
PIECES: dict[str, tuple[Callable[[], dict[str, nn.Module]], Callable[[Any, Tensor], Tensor]]] = {
    "positions": (inner(nn.Embedding, LONG, H), lambda m, x: x + m.inner(numbers(x))),
    "positions, a row": (inner(nn.Embedding, LONG, H), lambda m, x: x + m.inner(numbers(x)[None])),
    "positions of each": (
        inner(nn.Embedding, LONG, H), lambda m, x: x + m.inner(numbers(x).expand(x.shape[:2])),
    ),
    "scaled": (SCALED, lambda m, x: (x * m.scale() + m.shift()) * m.factor()),
    "queries": (QUERIES, partial(queried, expands=False)),
    "queries of each": (QUERIES, partial(queried, expands=True)),
    "normed by row": (lambda: {"inner": weight_norm(nn.Linear(H, H))}, lambda m, x: x + m.inner(x)),
    "normed by column": (
        lambda: {"inner": weight_norm(nn.Linear(H, H), dim=1)}, lambda m, x: x + m.inner(x),
    ),
    "symmetric": (lambda: {"inner": symmetric()}, lambda m, x: x + m.inner(x).tanh()),
    "feed": (FEED, feed),
    "feed, normed": (FEED, feed),
    "gru": (inner(nn.GRU, H, H, batch_first=True), lambda m, x: x + m.inner(x)[0]),
    "lstm, time first": (
        inner(nn.LSTM, H, H), lambda m, x: x + m.inner(x.transpose(0, 1))[0].transpose(0, 1),
    ),
    "attention": (
        inner(nn.MultiheadAttention, H, 2, batch_first=True), lambda m, x: x + m.inner(x, x, x)[0],
    ),
    "attention, time first": (
        inner(nn.MultiheadAttention, H, 2),
        lambda m, x: x + m.inner(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1),
    ),
    "encoder": (
        inner(nn.TransformerEncoderLayer, H, 2, 12, dropout=0.0, batch_first=True),
        lambda m, x: m.inner(x),
    ),
    "convolution": (
        inner(nn.Conv1d, H, H, 3, padding=1, groups=2),
        lambda m, x: x + m.inner(x.transpose(1, 2)).transpose(1, 2),
    ),
    "groups": (
        inner(nn.GroupNorm, 2, H), lambda m, x: x + m.inner(x.transpose(1, 2)).transpose(1, 2),
    ),
    "layer norm": (inner(nn.LayerNorm, H), lambda m, x: m.inner(x)),
    "root mean square": (inner(nn.RMSNorm, H), lambda m, x: m.inner(x)),
}  # fmt: skip


class Piece(nn.Module):
    """One of them."""

    def __init__(self, name: str):
        super().__init__()
        self.how, self.normed, self.recomputes = PIECES[name][1], name == "feed, normed", False
        for each, module in PIECES[name][0]().items():
            setattr(self, each, module)

    def cut(self, group: Any) -> None:
        """Keep this rank's part of a feed, then norm it."""
        if self.how is feed and group is not None:
            n, r = dist.get_world_size(group), dist.get_rank(group)
            self.group, up, down = group, self.up, self.down
            self.up, self.down = nn.Linear(H, 12 // n), nn.Linear(12 // n, H, bias=False)
            self.up.weight.data, self.up.bias.data = up.weight.data.chunk(n)[r], up.bias.chunk(n)[r]
            self.down.weight.data = down.weight.data.chunk(n, 1)[r].contiguous()
        if self.normed:
            weight_norm(self.up)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self.how, self, x, use_reentrant=False)
        return self.how(self, x)


class Chain(nn.ModuleDict):
    """A container that is called."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.values():
            x = part(x)
        return x


class Net(nn.Module):
    """A language model; of its pieces a stage has some, and ends where it has the ends."""

    def __init__(self, job: Job, which: range | None = None):
        super().__init__()
        torch.manual_seed(job.seed)
        parts = {"wte": nn.Embedding(VOCAB, H)}
        parts |= {str(n): Piece(name) for n, name in enumerate(job.pieces)}
        parts |= {"head": nn.Linear(H, VOCAB, bias=False)}
        if which is not None:
            names = list(parts)[1:-1][which.start : which.stop]
            names = ["wte"] * (which.start == 0) + names
            names += ["head"] * (which.stop == len(job.pieces))
            parts = {name: parts[name] for name in names}
        kind = nn.ModuleDict if job.container == "dictionary" else Chain
        inside = {"outer": Chain({"inner": Chain(parts)})} if job.container == "nested" else parts
        self.body, self.twice = kind(inside), job.twice
        if job.tied:
            parts["head"].weight = parts["wte"].weight

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.body, Chain):
            return self.body(x)
        for name, part in self.body.items():
            x = part(part(x)) if self.twice and name not in ("wte", "head") else part(x)
        return x


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is split."""

    seed: int = 0
    split: str = "loop"
    ranks: int = 2
    tensor: int = 1
    pieces: tuple[str, ...] = ("feed",)
    container: str = "dictionary"
    tied: bool = False
    twice: bool = False  # each piece is called
    frozen: bool = False  # the first piece is
    recomputes: bool = False  # the parallel program does
    samples: int = 12
    length: int = 6
    texts: str = "any"
    share: str = "in a row"
    micro: int = 1
    plain_micro: int = 1
    loss: str = "count"
    rule: str = "SGD"
    clip: float = 0.0
    steps: int = 1
    dtype: torch.dtype = torch.float32
    forgets: bool = False  # a wrong one: to average the first gradient, or to send its weight

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, targets, of which some have none, and how many have one."""
        g = torch.Generator().manual_seed(1000 * self.seed + step)
        x = torch.randint(1, VOCAB, (self.samples, self.length), generator=g)
        y = torch.randint(VOCAB, (self.samples, self.length), generator=g)
        if self.texts == "begin alike":
            x[:, 0] = 1
        if self.texts == "repeated":
            x, y = (z[torch.arange(self.samples) // 2] for z in (x, y))
        if self.texts in ("one", "constant"):
            x = x[:1].expand_as(x) if self.texts == "one" else torch.ones_like(x)
        if "padded" in self.texts:
            some = torch.randint(1, self.length + 1, (self.samples, 1), generator=g)
            some[self.samples // 2] *= self.texts == "padded"
            behind = torch.arange(self.length) >= some
            x, y = x.masked_fill(behind, 0), y.masked_fill(behind, IGNORED)
        return x, y, (y != IGNORED).sum()

    def shares(self, step: int, copies: int, copy: int) -> tuple[Tensor, ...]:
        """The micro-batches of a copy, as uneven as they come."""
        every = torch.arange(self.samples)
        if self.share == "shuffled":
            every = every[
                torch.randperm(self.samples, generator=torch.Generator().manual_seed(step))
            ]
        dealt = self.share == "dealt"
        mine = every[copy::copies] if dealt else every.tensor_split(copies)[copy]
        if dealt and self.seed % 2:
            return tuple(mine[n :: self.micro] for n in range(self.micro))
        return mine.tensor_split(self.micro)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        kind, options = RULES[self.rule]
        options = options | {"foreach": False}
        if self.split == "ZeRO-1 by hand" and dist.get_world_size() > 1:
            parameters = [*parameters][dist.get_rank() :: dist.get_world_size()]
        if self.split == "ZeroRedundancyOptimizer" and dist.get_world_size() > 1:
            return ZeroRedundancyOptimizer(parameters, kind, **options)
        return kind(parameters, **options)


def lost(y: Tensor, target: Tensor) -> Tensor:
    """The sum over tokens that have a target."""
    return F.cross_entropy(y.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED)


def prepared(job: Job, group: Any = None, which: range | None = None) -> nn.Module:
    """The model, or this rank's part of it."""
    model = Net(job, which)
    for piece in (m for m in model.modules() if isinstance(m, Piece)):
        piece.cut(group)
        piece.recomputes = job.recomputes and dist.get_world_size() > 1
    for name, p in model.named_parameters():
        p.requires_grad_(not (job.frozen and ".0." in f".{name}"))
    return model.to(job.dtype)


def plain(job: Job) -> Callable[[Any], None]:
    """One process, with the whole batch or micro-batches of its own."""

    def program(watch: Any) -> None:
        model = prepared(job)
        optimizer = job.optimizer(model.parameters())
        watch(model, optimizer)
        for step in range(job.steps):
            optimizer.zero_grad()
            x, y, count = job.batch(step)
            for part in torch.arange(job.samples).tensor_split(job.plain_micro):
                (lost(model(x[part]), y[part]) / count).backward()
            if job.clip:
                nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()

    return program


def parallel(job: Job) -> Callable[[Any], None]:
    """The same on ranks."""
    return partial(staged if job.split == "stages" else copied, job)


def wrapped(job: Job, model: Any, group: Any) -> nn.Module:
    """By a library, if the job has one."""
    if job.split in ("DDP", "ZeroRedundancyOptimizer"):
        return DistributedDataParallel(model, process_group=group)
    if job.split == "FSDP2":
        mesh = DeviceMesh.from_group(group, "cpu")
        for part in [] if job.tied else [*model.body.values()][: job.seed % 3]:
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if job.split == "DTensor":
        plan = {"up": by_torch.ColwiseParallel(), "down": by_torch.RowwiseParallel()}
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        feeds = (m for m in model.modules() if isinstance(m, Piece) and m.how is feed)
        for piece in (m for m in feeds if not m.normed):  # torch cuts no parametrization
            by_torch.parallelize_module(piece, mesh, plan)
    return model


def copied(job: Job, watch: Any) -> None:
    """Copies of the model, each of them maybe cut over tensor ranks."""
    n, rank, t = dist.get_world_size(), dist.get_rank(), job.tensor
    mine = [dist.new_group([*range(i, i + t)]) for i in range(0, n, t)][rank // t]
    others = [dist.new_group([*range(i, n, t)]) for i in range(t)][rank % t]
    by_hand = t > 1 and job.split != "DTensor"
    whole = prepared(job, mine if by_hand else None)
    model, weights = wrapped(job, whole, others), [*whole.parameters()]
    weights = [p for p in weights if p.requires_grad]
    owners = {p: i % n for i, p in enumerate(model.parameters()) if job.split == "ZeRO-1 by hand"}
    copies, copy = n // t, rank // t
    optimizer = job.optimizer(model.parameters())
    watch(model, optimizer)
    for step in range(job.steps):
        model.zero_grad()
        x, y, count = job.batch(step)
        parts = job.shares(step, copies, copy)
        has = (y[torch.cat(parts)] != IGNORED).sum()
        by = has if job.loss == "own" else count
        times = copies if job.split in AVERAGED else 1024 if job.loss == "scaled" else 1
        for k, part in enumerate(parts):
            if job.split == "DDP":
                model.require_backward_grad_sync = k == len(parts) - 1
            if job.split == "FSDP2" and job.seed % 2:
                model.set_requires_gradient_sync(k == len(parts) - 1)
            (lost(model(x[part]), y[part]) * times / by).backward()
        for p in weights[job.forgets and not owners :] if job.split in BY_HAND else ():
            p.grad *= int(has) / int(count) if job.loss == "own" else 1 / times
            if job.split == "loop" or job.clip:
                dist.all_reduce(p.grad, group=others)
            else:
                dist.reduce(p.grad, owners[p])
        if job.clip:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        for p in [*owners][job.forgets :]:
            dist.broadcast(p.data, owners[p])


def staged(job: Job, watch: Any) -> None:
    """torch's pipeline, a stage on each rank, which keeps its model's container."""
    n, rank = dist.get_world_size(), dist.get_rank()
    per = len(job.pieces) // n
    model = prepared(job, which=range(rank * per, (rank + 1) * per))
    optimizer = job.optimizer(model.parameters())
    watch(model, optimizer)
    stage = pipelining.PipelineStage(model, rank, n, torch.device("cpu"))
    kind = pipelining.ScheduleGPipe if job.share == "dealt" else pipelining.Schedule1F1B
    for step in range(job.steps):
        optimizer.zero_grad()
        x, y, count = job.batch(step)
        mean = lambda a, b, count=count: lost(a, b) / count  # noqa: E731
        schedule = kind(stage, job.micro, mean, scale_grads=False)
        schedule.step(*[x] * (rank == 0), **({"target": y} if rank == n - 1 else {}))
        optimizer.step()


SPLITS = ("loop",) * 6 + ("DDP",) * 3 + ("FSDP2",) * 2 + ("stages",) * 3 + ("DTensor",)
SPLITS += ("ZeroRedundancyOptimizer", "ZeRO-1 by hand")
LOSSES = "count", "scaled", "own"
TEXTS = "any", "begin alike", "repeated", "one", "constant", "padded", "padded, one empty"


def drawn(seed: int) -> Job:
    """The right job of a seed."""
    r = Random(seed)
    split, ranks = r.choice(SPLITS), r.choice((2, 2, 2, 3, 4))
    stages = split == "stages"
    tensor = r.choice((1, 1, 2)) if split == "loop" and ranks % 2 == 0 else 1
    tensor = ranks if split == "DTensor" else tensor
    micro = ranks * r.choice((1, 2)) if stages else r.choice((1, 2, 3, 4))
    samples = r.choice((12, 24)) if r.random() < 0.5 else r.randint(12, 20)
    pieces = r.choices([*PIECES], k=ranks * r.choice((1, 2)) if stages else r.randint(1, 3))
    pieces += ["feed"] * (split == "DTensor")
    ranks = min(ranks, len(pieces) + 1) if split == "ZeRO-1 by hand" else ranks
    trains = len(pieces) > 1
    return Job(
        seed, split, ranks, tensor, tuple(pieces), r.choice(("dictionary", "called", "nested")),
        not stages and r.random() < 0.3, r.random() < 0.2, trains and r.random() < 0.15,
        split == "loop" and r.random() < 0.2, micro * r.choice((1, 2, 3)) if stages else samples,
        r.randint(3, LONG), r.choice(TEXTS), r.choice(("in a row", "dealt", "shuffled")), micro,
        r.choice((1, 1, 2, 3)), r.choice(LOSSES if split == "loop" else LOSSES[:1]),
        r.choice([*RULES]), 0.0 if tensor > 1 or stages else r.choice((0.0, 0.0, 0.3)),
        r.choice((1, 2, 3)), r.choice((torch.float32, torch.float32, torch.float64)),
    )  # fmt: skip
