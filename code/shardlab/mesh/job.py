"""A small job on any mesh, for the command and the lesson: it trains, counts, and is compared.

Every step's batch is a window of the offline text, dealt out to the copies in order.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import count, memory, ranks, text
from shardlab.arguments import check_whole
from shardlab.count import clock
from shardlab.model import GPT, loss
from shardlab.pipeline import schedule
from shardlab.shapes import Config

from .core import Parallel, join
from .layout import Mesh
from .predict import check_cuts, counted, held, predicted_sent, predicted_states
from .states import whole

RATE = 1e-3
# What a machine without a GPU trains in minutes; beyond it a run would not end.
MOST_LAYERS, MOST_PARAMETERS, MOST_TOKENS = 1_000, 10**8, 10**7


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is cut. batch: sequences of all copies in a step.

    Raises ValueError for what cannot be trained, before any rank starts.
    """

    config: Config
    mesh: Mesh = field(default_factory=Mesh)
    zero: int = 0
    sequence: bool = False
    microbatches: int = 1
    schedule: str = "1f1b"
    batch: int = 8
    steps: int = 5

    def __post_init__(self) -> None:
        check_whole(microbatches=self.microbatches, batch=self.batch)
        check_whole(3, steps=self.steps)
        self._check_size()
        seq = self.config.seq if self.sequence else None
        check_cuts(self.config, self.mesh, self.schedule, self.zero, seq)
        least = self.mesh.dp * self.microbatches
        if self.batch % self.mesh.dp or self.batch < least:
            what = f"multiples of dp={self.mesh.dp}, {least} or more for {self.microbatches}"
            raise ValueError(f"batch={self.batch}: allowed are {what} micro-batches of each copy")
        if self.mesh.ranks > (most := ranks.max_ranks()):
            raise ValueError(f"ranks={self.mesh.ranks}: allowed on this machine are 1 to {most}")

    def _check_size(self) -> None:
        config, tokens = self.config, self.batch * self.config.seq * self.steps
        for name, count_of, most in (
            ("layers", lambda: config.layers, MOST_LAYERS),  # the next one counts layer by layer
            ("parameters", lambda: memory.parameter_count(config), MOST_PARAMETERS),
            ("batch · seq · steps", lambda: tokens, MOST_TOKENS),
        ):
            if (value := count_of()) > most:
                raise ValueError(f"{name}={value}: allowed here are {most:,} at most")

    @property
    def share(self) -> int:
        """Sequences of a copy."""
        return self.batch // self.mesh.dp

    def states(self, rank: int) -> dict[str, int]:
        """Bytes of model states on a rank, predicted."""
        return predicted_states(self.config, self.mesh, rank, self.zero)

    def sent(self, rank: int) -> dict[str, float]:
        """Bytes that leave a rank in a step, predicted."""
        how = self.share, self.config.seq, self.microbatches, self.zero, self.sequence
        return predicted_sent(self.config, self.mesh, rank, *how)


def batch_of(job: Job, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all copies in a step, [batch, seq] each."""
    tokens, targets = text.batch(job.config.seq, job.batch, start=step * job.batch)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def model_of(config: Config) -> GPT:
    """The same numbers on every rank."""
    torch.manual_seed(0)
    return GPT(config).to(ranks.device())


def train(job: Job) -> dict[str, Any]:
    """On a rank of the mesh: the job's losses, gradients of its last step and weights; what the
    rank held and sent, predicted and counted; seconds of the steps between the first and the last.
    """
    groups = join(job.mesh, dist.group.WORLD)
    plan = schedule(job.schedule, job.mesh.pp, job.microbatches)
    model = Parallel(model_of(job.config), groups, plan, job.zero, job.sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=False)
    rank, copy, device = dist.get_rank(), dist.get_rank(groups.dp), ranks.device()
    losses, seconds = [], []

    batches = [[x.chunk(job.mesh.dp)[copy] for x in batch_of(job, n)] for n in range(job.steps)]
    for tokens, targets in batches[:-1]:
        dist.barrier()
        begin = clock(device)
        losses.append(model.step(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(clock(device) - begin)
    with count.sent() as sent, count.held(model, optimizer, device=device) as most:
        losses.append(model.step(*batches[-1]))
    gradients = whole(model, lambda piece: piece.grad)
    found = held(model, optimizer)
    optimizer.step()
    predicted = job.sent(rank)
    predicted["pp"] += predicted.pop("twin")
    weights = whole(model)
    return {
        "losses": [value.item() for value in losses],
        "gradients": gradients if rank == 0 else {},
        "weights": weights if rank == 0 else {},
        "place": job.mesh.place(rank),
        "held": found,
        "held_predicted": job.states(rank),
        "peak": most.peak,
        "sent": counted(sent, model),
        "sent_predicted": predicted,
        "seconds": statistics.median(seconds[1:]),
    }


def alone(job: Job) -> dict[str, Any]:
    """The same in one process, which sees the whole batch."""
    model = model_of(job.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=False)
    losses = []
    for number in range(job.steps):
        optimizer.zero_grad()
        tokens, targets = batch_of(job, number)
        value = loss(model(tokens), targets)
        value.backward()
        losses.append(value.item())
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": model.state_dict()}


def apart(found: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """The largest differences of a job's losses, gradients and weights from one process's."""
    pairs = zip(found["losses"], want["losses"], strict=True)
    gaps = {"losses": max(abs(a - b) for a, b in pairs)}
    for kind in ("gradients", "weights"):
        gaps[kind] = max((found[kind][n] - w).abs().max().item() for n, w in want[kind].items())
    return gaps


def run(job: Job) -> dict[str, Any]:
    """Train it on its ranks, and in one process; everything that the command prints."""
    results = ranks.run(train, job.mesh.ranks, job, timeout=600, show=False)
    gaps = apart(results[0], ranks.run(alone, 1, job, timeout=600, show=False)[0])
    kept = [{k: v for k, v in r.items() if k not in ("gradients", "weights")} for r in results]
    seconds = max(result["seconds"] for result in results)
    return {
        "mesh": asdict(job.mesh),
        "ranks": kept,
        "losses": results[0]["losses"],
        "differences": gaps,
        "seconds": seconds,
        "tokens_per_second": job.batch * job.config.seq / seconds,
    }
