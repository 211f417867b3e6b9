"""A small training job on any mesh, for the command and the lesson, compared with one process.

Every step's batch is a window of the offline text, split over the replicas in order.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.common.arguments import check_integer, check_type
from shardlab.common.shapes import Config
from shardlab.gpt.model import loss
from shardlab.layout import Layout
from shardlab.measure import count
from shardlab.measure.comparison import build_model, load_batch
from shardlab.measure.count import read_clock

from .core import Parallel, create_groups
from .predict import check_supported, predict_sent_bytes, predict_state_bytes
from .states import count_sent_bytes, gather_model_tensors, measure_state_bytes

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Job:
    """A model, its layout and the number of steps to train.

    Raises ValueError for a job that cannot be trained, before any rank starts.
    """

    config: Config
    layout: Layout = field(default_factory=Layout)
    steps: int = 5

    def __post_init__(self) -> None:
        check_integer(3, steps=self.steps)
        check_type(Config, config=self.config)
        check_type(Layout, layout=self.layout)
        check_supported(self.config, self.layout, self.config.seq)
        if (size := self.layout.world_size) > (most := ranks.max_world_size()):
            raise ValueError(f"ranks={size}: must be at most {most} on this machine")

    def predict_state_bytes(self, rank: int) -> dict[str, int]:
        """Predict the bytes of model states on a rank."""
        return predict_state_bytes(self.config, self.layout, rank)

    def predict_sent_bytes(self, rank: int) -> dict[str, float]:
        """Predict the bytes that leave a rank in a step."""
        return predict_sent_bytes(self.config, self.layout, rank)


def train_on_rank(job: Job) -> dict[str, Any]:
    """Train `job` on this rank; return losses, last gradients, weights, bytes and seconds."""
    config, layout = job.config, job.layout
    groups = create_groups(layout, dist.group.WORLD)
    model = Parallel(build_model(config), groups, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    rank, copy, device = dist.get_rank(), dist.get_rank(groups.dp), ranks.device()
    losses, seconds = [], []

    whole_batches = (load_batch(config, layout.global_batch, step) for step in range(job.steps))
    batches = [[x.chunk(layout.dp)[copy] for x in batch] for batch in whole_batches]
    for tokens, targets in batches[:-1]:
        dist.barrier()
        begin = read_clock(device)
        losses.append(model.step(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(read_clock(device) - begin)
    memory = count.track_memory(model, optimizer, device=device)
    with count.record_traffic() as sent, memory as tracker:
        losses.append(model.step(*batches[-1]))
    gradients = gather_model_tensors(model, lambda piece: piece.grad)
    found = measure_state_bytes(model, optimizer)
    optimizer.step()
    predicted = job.predict_sent_bytes(rank)
    predicted["pp"] += predicted.pop("twin")
    weights = gather_model_tensors(model)
    return {
        "losses": [value.item() for value in losses],
        "gradients": gradients if rank == 0 else {},
        "weights": weights if rank == 0 else {},
        "place": layout.get_coordinates(rank),
        "held": found,
        "held_predicted": job.predict_state_bytes(rank),
        "peak": tracker.peak_bytes,
        "sent": count_sent_bytes(sent, model),
        "sent_predicted": predicted,
        "seconds": statistics.median(seconds[1:]),
    }


def train_single_process(job: Job, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Train the same job in one process, which sees the whole batch."""
    model = build_model(job.config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    losses = []
    for number in range(job.steps):
        optimizer.zero_grad()
        tokens, targets = load_batch(job.config, job.layout.global_batch, number)
        value = loss(model(tokens), targets)
        value.backward()
        losses.append(value.item())
        optimizer.step()
    trained = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in trained.items()}
    return {"losses": losses, "gradients": gradients, "weights": trained}


def compare_runs(found: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences of losses, gradients and weights between two runs."""
    pairs = zip(found["losses"], want["losses"], strict=True)
    gaps = {"losses": max(abs(a - b) for a, b in pairs)}
    for kind in ("gradients", "weights"):
        gaps[kind] = max((found[kind][n] - w).abs().max().item() for n, w in want[kind].items())
    return gaps


def measure_rounding(job: Job) -> dict[str, float]:
    """Return the differences between one process in float32 and in float64: rounding alone."""
    narrow, wide = (
        ranks.run(train_single_process, 1, job, dtype, timeout=600, show=False)[0]
        for dtype in (torch.float32, torch.float64)
    )
    return compare_runs(narrow, wide)


def run(job: Job) -> dict[str, Any]:
    """Train `job` on its ranks and in one process; return everything that the command prints."""
    results = ranks.run(train_on_rank, job.layout.world_size, job, timeout=600, show=False)
    (plain,) = ranks.run(train_single_process, 1, job, timeout=600, show=False)
    gaps = compare_runs(results[0], plain)
    kept = [{k: v for k, v in r.items() if k not in ("gradients", "weights")} for r in results]
    seconds = max(result["seconds"] for result in results)
    return {
        "layout": asdict(job.layout),
        "ranks": kept,
        "losses": results[0]["losses"],
        "differences": gaps,
        "seconds": seconds,
        "tokens_per_second": job.layout.global_batch * job.config.seq / seconds,
    }
