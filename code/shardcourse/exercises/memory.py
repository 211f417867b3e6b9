"""Exercises of the lesson `memory`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import add_cases, add_number, call_answer
from shardlab import memory
from shardlab.common import text
from shardlab.gpt.model import GPT, PRESETS, Config, loss
from shardlab.layout import Layout
from shardlab.measure import count

add_number("state_gigabytes", 24, "GB", rel_tol=0.001,
       success="Right: 1.5 billion times 16 bytes. The weights are an eighth of it.", hints={
    3: "That is the weights in bfloat16 alone: gradients and optimizer are missing.",
    6: "That is four bytes for each parameter: weights and gradients in bfloat16. The "
    "optimizer keeps three float32 numbers as well.",
})  # fmt: skip
add_number("largest_model", 3.75, "billion parameters", rel_tol=0.005,
       success="Right: 60 GB at 16 bytes each. In bfloat16 such a model's file is just 7.5 GB.",
       hints={
    5: "That fills all 80 GB with states. The activations need their 20 GB at the same time: "
    "gradients arrive while they are still held.",
    30: "Two bytes each: that model can be loaded, not trained.",
})  # fmt: skip


def _count_bytes(params: int, precision: str, optimizer: str, master: bool = True) -> float:
    copy = 0 if master or precision == "fp32" else 4 * params
    return memory.estimate_states(params, precision=precision, optimizer=optimizer).total - copy


add_cases(
    "my_states_bytes",
    [
        (1_000_003, precision, optimizer)
        for precision in ("fp32", "bf16", "bf16-fp32-gradients")
        for optimizer in ("sgd", "momentum", "adamw")
    ],
    _count_bytes,
    mistakes={"Is the float32 copy of the weights counted?": partial(_count_bytes, master=False)},
    success="Right: nine recipes, equal to the calculator to the byte.",
)


def _make_toy_job() -> tuple[GPT, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(PRESETS["nano"])
    return (model, *text.get_batch(PRESETS["nano"].seq, 8))


@add_exercise("my_evaluate")
def _(answer: Callable[..., Any]) -> str:
    model, tokens, targets = _make_toy_job()
    batches = list(zip(tokens.split(1), targets.split(1), strict=True))
    with torch.no_grad(), count.track_memory(model, tokens, targets) as frugal:
        want = sum(loss(model(x), y).item() for x, y in batches) / len(batches)
    held: list[int] = []

    def record_bytes() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in batches:
            held.append(watch.current_bytes)
            yield batch

    with count.track_memory(model, tokens, targets) as watch:
        mean = call_answer(answer, model, record_bytes())
    if isinstance(mean, bool) or not isinstance(mean, (int, float, torch.Tensor)):
        raise WrongAnswer(f"It returned {mean!r}: expected is the mean loss, a number.")
    mean = mean.item() if isinstance(mean, torch.Tensor) else mean
    if not abs(mean - want) < 1e-4:  # float32, values of about 6, in any order of summation
        total = " That is their sum." if abs(mean / len(batches) - want) < 1e-4 else ""
        raise WrongAnswer(f"The mean loss is {want:.4f}, and it returned {mean:.4f}.{total}")
    growth = (held[-1] - held[0]) / (len(held) - 1)
    if growth > 1000:  # a loss or its number of logits is 4 bytes; activations are about 100 kB
        raise WrongAnswer(
            f"The mean is right, but with every batch {growth / 1e3:,.0f} kB more are held than "
            "before: the loss that you add up keeps its graph, and the graph all its activations."
        )
    if watch.peak_bytes > 1.02 * frugal.peak_bytes + 1000:
        extra = (watch.peak_bytes - frugal.peak_bytes) / 1e3
        raise WrongAnswer(
            f"The mean is right and nothing piles up, but each batch takes {extra:,.0f} kB more "
            "than it has to: autograd still saves activations for a backward that never comes."
        )
    return "Right: the mean of all batches, and the last one holds no more than the first."


def _find_largest_batch(config: Config, limit: float) -> int:
    batch = 0
    while memory.estimate_step(config, Layout(micro_batch=batch + 1)).peak <= limit:
        batch += 1
    return batch


_LARGE_LOGITS = Config(8192, 256, 4, 4, 256)
add_cases(
    "my_largest_batch",
    (  # cases: a model that fits many times, one that fits to the byte, one that does not fit
        (PRESETS["gpt-2"], 16e9),
        (_LARGE_LOGITS, memory.estimate_step(_LARGE_LOGITS, Layout(micro_batch=9)).peak),
        (PRESETS["llama-3-8b"], 80e9),
    ),
    _find_largest_batch,
    success="Right: as many sequences as fit, and none where the states do not.",
)


def _accumulate_gradients(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    for x, y in zip(tokens.chunk(4), targets.chunk(4), strict=True):
        (loss(model(x), y) / 4).backward()


def _run_backward(backward: Callable[..., Any]) -> tuple[list[torch.Tensor | None], int]:
    model, tokens, targets = _make_toy_job()
    with count.track_memory(model, tokens, targets) as held:
        backward(model, tokens, targets)
    return [p.grad for p in model.parameters()], held.peak_bytes


@add_exercise("my_backward")
def _(answer: Callable[..., Any]) -> str:
    right, limit = _run_backward(_accumulate_gradients)
    got, peak = _run_backward(lambda *job: call_answer(answer, *job))
    if any(gradient is None for gradient in got):
        raise WrongAnswer("Some parameters have no gradient: did a backward run on every piece?")
    factor = (sum(g.norm() ** 2 for g in got) / sum(g.norm() ** 2 for g in right)) ** 0.5
    gap = max((a - b).abs().max().item() for a, b in zip(got, right, strict=True))
    if not gap < 1e-5:  # float32, values up to about 1, sums of 512 terms in another order
        times = f"It is about {factor:.2g} times as long. " if not 0.99 < factor < 1.01 else ""
        raise WrongAnswer(
            f"The gradient is off by up to {gap:.2g}. {times}The mean over eight sequences is the "
            "sum of the pieces' means, each weighted by its share of the sequences."
        )
    if peak > 1.02 * limit:  # room for a few small tensors that another solution may keep
        raise WrongAnswer(
            f"The gradient is right, but up to {peak / 1e6:.2f} MB were held, and "
            f"{limit / 1e6:.2f} MB are enough for two sequences at a time. Let each piece's "
            "backward run before the next piece's forward begins."
        )
    return f"Right: the gradient of all eight sequences, and a peak of {peak / 1e6:.2f} MB."


def _fit_micro_batch(
    config: Config, batch: int, limit: float, steps: bool = False
) -> tuple[int, str] | None:
    """Return (micro-batch, recompute); `steps`: a mistake that gives each micro-batch a step."""
    for recompute in ("none", "full"):
        for piece in (n for n in range(batch, 0, -1) if batch % n == 0):
            layout = Layout(
                micro_batch=piece, microbatches=1 if steps else batch // piece, recompute=recompute
            )
            if memory.estimate_step(config, layout).peak <= limit:
                return piece, recompute
    return None


add_cases(
    "my_micro_batch",
    # Limits in bytes, with room for the whole batch; for micro-batches of 4 (5 does not divide 12,
    # 6 forgets accumulated gradients); of 1; of 1 with recomputation; for none.
    [(PRESETS["mini"], 12, limit) for limit in (260e6, 190e6, 140e6, 135e6, 130e6)],
    _fit_micro_batch,
    mistakes={
        "It would fit if each piece were a step. The gradients of earlier pieces are there from "
        "the start: pass the number of pieces as microbatches.": partial(
            _fit_micro_batch, steps=True
        )
    },
    success="Right: smaller pieces first, recomputation only where single sequences need it.",
)
