"""Published silent bugs of parallel training, as programs: what they share, and their table.

THREADS has a row for each: a plain program and a parallel one with the bug, and without it. Models
are small; a bug of a library's is the library's own where it is still there (`live`), and otherwise
built anew. `parity_published_cuts` and `parity_published_copies` have those that the rules were
made with, `parity_published_installed` those that libraries still have, and
`parity_published_held_out` those that came when the rules were fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab import context_parallel as cp

WIDTH, INNER, WORDS, EXPERTS, BATCH, LENGTH = 8, 16, 12, 4, 8, 8
Program = Callable[[Any], None]
THREADS: dict[str, Thread] = {}


@dataclass(frozen=True)
class Thread:
    """A published bug."""

    ranks: int
    plain: Program
    program: Callable[[Any, bool], None]  # watch, whether it is the wrong one
    place: str  # where it shows, and in which words: regular expressions
    words: str
    said: str  # in the thread
    shows: str = ""  # the place that is named instead, where that is not the right one
    says: str = ""  # and the words
    live: str = ""  # the library's own, in this version
    held_out: bool = False  # the rules were fixed before it was written

    def wrong(self, watch: Any) -> None:
        """The program with the bug."""
        self.program(watch, True)

    def right(self, watch: Any) -> None:
        """Its control, without it."""
        self.program(watch, False)


def thread(
    name: str, ranks: int, plain: Program, place: str, words: str, said: str, **more: Any
) -> Callable[[Callable], Callable]:
    """Put the program that follows into the table."""

    def kept(program: Callable[[Any, bool], None]) -> Callable[[Any, bool], None]:
        THREADS[name] = Thread(ranks, plain, program, place, words, said, **more)
        return program

    return kept


class Net(nn.Module):
    """Tokens [batch, length] to logits [batch, length, words]: one block without attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.act = nn.GELU()
        self.down = nn.Linear(INNER, WIDTH)
        self.drop: nn.Module = nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        with torch.no_grad():
            for p in self.norm.parameters():  # so that every number says something
                p.add_(0.1 * torch.randn_like(p))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))

    def body(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Sparse(nn.Module):
    """Two of four experts for each token; `mine` are those that this process has."""

    def __init__(self, mine: range = range(EXPERTS)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        experts = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.experts = nn.ModuleDict({str(e): experts[e] for e in mine})
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        probabilities = self.seen(self.router(x).softmax(-1))
        score, self.index = probabilities.topk(2)
        return self.head(x + self.mixed(x, score))

    def seen(self, probabilities: Tensor) -> Tensor:
        """What an auxiliary loss looks at: [batch, length, experts]."""
        self.probabilities = probabilities
        return probabilities

    def mixed(self, x: Tensor, score: Tensor) -> Tensor:
        """The experts' outputs, of which each token has two, by its scores."""
        return sum(
            (score * (self.index == int(e))).sum(-1, keepdim=True) * expert(x).tanh()
            for e, expert in self.experts.items()
        )

    def counts(self) -> Tensor:
        """How many choices fell on each expert."""
        return torch.bincount(self.index.flatten(), minlength=EXPERTS).float()


def tokens(step: int = 0, length: int = LENGTH) -> Tensor:
    """A step's batch."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(WORDS, (BATCH, length), generator=generator)


def targets(x: Tensor) -> Tensor:
    """Of each token the next one, of the last the first."""
    return x.roll(-1, 1)


def cross_entropy(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


def one_loss(model: nn.Module, step: int) -> None:
    """Forward and backward of a whole batch."""
    x = tokens(step)
    cross_entropy(model(x), targets(x)).backward()


def nothing(*_: Any) -> None:
    """What is not done."""


def train(
    watch: Any,
    model: nn.Module,
    backward: Callable[[Any, int], None] = one_loss,
    after: Callable[[Any], None] = nothing,
    optimizer: Any = None,
    steps: int = 1,
) -> None:
    """Some steps; after: what is done with gradients before the optimizer's."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    watch(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        after(model)
        optimizer.step()


def clip(model: nn.Module) -> None:
    """At a limit that gradients here exceed."""
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


LIMIT = 0.1


def plain(watch: Any) -> None:
    train(watch, Net())


def plain_clipped(watch: Any) -> None:
    train(watch, Net(), after=clip)


def plain_sparse(watch: Any) -> None:
    train(watch, Sparse())


def plain_sparse_clipped(watch: Any) -> None:
    train(watch, Sparse(), after=clip)


# What ranks do


def here() -> tuple[int, int]:
    """This rank, and how many there are."""
    return dist.get_rank(), dist.get_world_size()


def mine(x: Tensor, dimension: int = 0) -> Tensor:
    """This rank's part."""
    rank, ranks = here()
    return x.chunk(ranks, dimension)[rank]


def zigzag(x: Tensor) -> Tensor:
    """This rank's two pieces of the sequence: an early one, and a late one."""
    rank, ranks = here()
    return cp.split(x, ranks, rank, "zigzag", 1)


def summed(x: Tensor, group: Any = None) -> Tensor:
    """Over ranks; no gradient goes through it."""
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


def sum_gradients(model: nn.Module, without: str = " ", over: float = 1.0) -> None:
    """Of all parameters but those that begin so, divided by `over`."""
    for name, p in model.named_parameters():
        if not name.startswith(without):
            p.grad = summed(p.grad) / over


def average_gradients(model: nn.Module) -> None:
    sum_gradients(model, over=dist.get_world_size())


def share_loss(model: nn.Module, step: int) -> None:
    """Forward and backward of this rank's share of a batch."""
    x = tokens(step)
    cross_entropy(model(mine(x)), mine(targets(x))).backward()


def scale_to(model: nn.Module, norm: Tensor) -> None:
    """Clip at LIMIT by a norm that is given."""
    for p in model.parameters():
        p.grad *= (LIMIT / (norm + 1e-6)).clamp(max=1)  # as torch does
