"""Five training steps on ranks, compared with one process: `python -m shardlab.zero` and others.

    python -m shardlab.data_parallel
    torchrun --nproc-per-node 2 -m shardlab.data_parallel

Each such module has a function that trains with its technique on a rank, and returns a `Comparison`
of bytes and weights. `main` calls the function on two ranks, or on torchrun's, and prints results.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import ranks
from shardlab.common import show, text
from shardlab.common.shapes import PRESETS, Config
from shardlab.gpt.model import GPT, loss
from shardlab.measure import count
from shardlab.ranks import torchrun

MODEL = PRESETS["nano"]
SEQS_PER_RANK = 4  # sequences of a step's batch, for each rank
STEPS, LEARNING_RATE = 5, 1e-3
# AdamW divides by the size of a gradient, plus this number. With the usual 1e-8, rounding would
# decide which way a weight moves whose gradient is almost 0.
ADAM_EPSILON = 1e-3

Batch = tuple[Tensor, Tensor]  # inputs and targets
Backward = Callable[..., object]  # called with a model and a batch: runs forward and backward


class Run(NamedTuple):
    """Bytes of a rank's five steps."""

    states: int  # parameters, gradients and optimizer states, after the last step
    peak: int
    sent: count.Traffic  # of the last step


class Comparison(NamedTuple):
    """Results of a rank: bytes as (predicted, counted), and the largest difference of weights."""

    bytes: dict[str, tuple[float, float]]
    gap: float  # from one process; 0 on all ranks but 0
    tolerance: float  # largest gap that rounding explains

    @property
    def passes(self) -> bool:
        """True if weights are equal up to rounding, and bytes as predicted; `peak` is estimated."""
        exact = (both for name, both in self.bytes.items() if name != "peak")
        return self.gap <= self.tolerance and all(abs(want - got) < 0.5 for want, got in exact)


def build_model(config: Config = MODEL) -> GPT:
    """Build a GPT with the same weights at every call, on this rank's device."""
    torch.manual_seed(0)
    return GPT(config).to(ranks.device())


def load_batch(config: Config, batch: int, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of all ranks in a step, [batch, seq] each."""
    tokens, targets = text.get_batch(config.seq, batch, start=step * batch)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def load_batches() -> list[Batch]:
    """Return the whole batch of each step, for a GPT of the length of MODEL."""
    size = SEQS_PER_RANK * dist.get_world_size()
    return [load_batch(MODEL, size, step) for step in range(STEPS)]


def backward_whole(model: nn.Module, tokens: Tensor, targets: Tensor) -> None:
    """Run forward and backward on the whole batch, as one process does."""
    loss(model(tokens), targets).backward()


def backward_share(model: nn.Module, *batch: Tensor) -> None:
    """Run forward and backward on this rank's share of the batch."""
    backward_whole(model, *(x.chunk(dist.get_world_size())[dist.get_rank()] for x in batch))


def train(model: Any, backward: Backward, batches: Sequence[Batch]) -> Run:
    """Train `model` with a step of AdamW for each batch, and count bytes.

    The states include a wrapped module's own parameters (`model.module`).
    """
    options = {"lr": LEARNING_RATE, "eps": ADAM_EPSILON, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    with count.track_memory(*model.parameters()) as memory:
        for batch in batches:
            optimizer.zero_grad()
            with count.record_traffic() as sent:
                backward(model, *batch)
                optimizer.step()
        peak = memory.peak_bytes
    held = count.measure_state_bytes(model, optimizer)
    own = getattr(model, "module", model).parameters()
    weights = count.sum_bytes([*model.parameters(), *own])
    return Run(weights + held["gradients"] + held["optimizer"], peak, sent)


def compare_weights(
    weights: Mapping[str, Tensor],
    build: Callable[[], nn.Module] = build_model,
    backward: Backward = backward_whole,
    batches: Sequence[Batch] | None = None,
    terms: int | None = None,
) -> tuple[float, float]:
    """Train `build()` in one process; return the largest gap from `weights`, and the tolerance.

    Only rank 0 compares; others return (0, 0). terms: length of the sums that ranks and one process
    add up in another order; None: the tokens of a batch. Such a sum is off by about sqrt(terms)
    roundings of the largest gradient. In each step AdamW moves a weight by at most LEARNING_RATE /
    ADAM_EPSILON times that error, and rounds the weight.
    """
    if dist.get_rank() != 0:
        return 0.0, 0.0
    plain, batches, largest = build(), load_batches() if batches is None else batches, 0.0

    def backward_and_measure(model: nn.Module, *batch: Tensor) -> None:
        nonlocal largest
        backward(model, *batch)
        largest = max(largest, _max_abs(p.grad for p in model.parameters()))

    train(plain, backward_and_measure, batches)
    gap = _max_abs(weights[name] - p for name, p in plain.named_parameters())
    error = math.sqrt(terms or batches[0][0].numel()) * largest * LEARNING_RATE / ADAM_EPSILON
    rounding = torch.finfo(torch.float32).eps
    return gap, STEPS * rounding * (error + _max_abs(plain.parameters()))


@torch.no_grad()
def _max_abs(tensors: Iterable[Tensor]) -> float:
    """Return the largest absolute value in any of `tensors`; nan if there is one."""
    ends = [torch.stack(tensor.aminmax()) for tensor in tensors]
    return torch.cat(ends).abs().max().item()


def main(
    train_on_rank: Callable[[Any], Comparison],
    kind: str,
    cases: Sequence[Any],
    world_size: int | None = None,
) -> int:
    """Run `train_on_rank(case)` on ranks, for each case; print results, return the exit status.

    kind: what a case is, as the head of the table's column. world_size: None: torchrun's, or 2. The
    status is 1 if weights or bytes of a case are not as expected, else 0.
    """
    argparse.ArgumentParser(description=train_on_rank.__doc__).parse_args()
    size = torchrun.get_rank_and_size()[1] if torchrun.is_torchrun_process() else 2
    rows, lines, passed = [], [], True
    for case in cases:
        results = ranks.run(train_on_rank, world_size or size, case, timeout=600)
        for rank, result in enumerate(results):
            sizes = (f"{n:,.0f}" for both in result.bytes.values() for n in both)
            rows.append((case, rank, *sizes))
        gap, tolerance = results[0].gap, results[0].tolerance
        word = "equal" if gap <= tolerance else "NOT equal"
        numbers = f"largest gap of a weight {gap:.1e}, rounding allows {tolerance:.1e}"
        lines.append(f"{kind} {case}: {word} to one process ({numbers})")
        passed = passed and all(result.passes for result in results)
    head = [f"{n}: {how} (B)" for n in results[0].bytes for how in ("predicted", "counted")]
    show.table(rows, [kind, "rank", *head])
    print(*lines, sep="\n")
    return 0 if passed else 1
