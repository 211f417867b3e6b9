"""Exercises of the lesson `deepspeed_engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import Number, add_blanks, add_cases, add_number, run_answer
from shardlab import deepspeed_engine, memory
from shardlab.common import text
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.layout import Layout

add_number("deepspeed_accumulation", 16, "micro-batches",
       success="Right: 512 = 4 × 16 × 8, since 64 GPUs hold 64 / (4 × 2) = 8 copies.", hints={
    2: "That divides by all 64 GPUs. The eight that share one copy of the model compute the "
    "same sequences: only the copies count.",
    4: "There are two pipeline stages as well, and they share a copy.",
})  # fmt: skip

_COST = 8 * 2.5 / 3600 / 20_000 * 1e6
add_number("deepspeed_cost", _COST, "per million tokens", rel_tol=0.01,
       success="Right: 20 per hour buy 72 million tokens.", hints={
    _COST / 8: "All eight GPUs are paid for while the job runs.",
    _COST * 3600: "The price is for an hour, and the rate is for a second.",
})  # fmt: skip

# The exercise's log: ranks, sequences of each rank, tokens of a prompt and of the whole sequence;
# then the new tokens, and what a GPU costs while the job runs, times a million.
_N, _BATCH, _PROMPT, _TOTAL = 4, 8, 512, 576
_NEW_TOKENS, _GPU_COST = _N * _BATCH * (_TOTAL - _PROMPT), 2.5 * 16.0 / 3600 * 1e6
_HINT = "How many bytes are 8.03e9 parameters in bf16, and what does a rank hold?"
add_blanks(
    "deepspeed_log",
    {
        "parallelism": "data",
        "tokens": Number(_NEW_TOKENS, "tokens", {
            _N * _BATCH * _PROMPT: "That is the log's number, which counts the input, too.",
            _N * _BATCH * _TOTAL: "The output begins with the input, which was not generated.",
        }),
        "price": Number(_N * _GPU_COST / _NEW_TOKENS, "per million tokens", {
            _GPU_COST / _NEW_TOKENS: "That is the price of one GPU, but there were four.",
        }, 0.01),
    },
    success="Right: copies, 2,048 new tokens, and 32 times the price that the log states.",
    default_hint="Allowed are 'data', 'tensor', 'pipeline' and 'zero3'.",
    hints={
        ("parallelism", "tensor"): f"Requested, but it would cut the matrices in four. {_HINT}",
        ("parallelism", "zero3"): f"It would cut the weights in four. {_HINT}",
        ("parallelism", "pipeline"): f"It would cut the layers in four. {_HINT}",
    },
)  # fmt: skip


def _count_steps(train: int, micro: int, world: int, tp: int, pp: int) -> int | str:
    """Return the number of accumulation steps, or "a ValueError" if there is none."""
    copies, rest = divmod(world, tp * pp)
    steps, more = divmod(train, micro * copies) if copies else (0, 0)
    return steps if steps and not rest and not more else "a ValueError"


def _catch_value_error(answer: Callable[..., Any], *given: int) -> Any:
    try:
        return answer(*given)
    except ValueError:
        return "a ValueError"


# No accumulation steps fit the last three cases.
_BATCHES = (
    (512, 4, 64, 4, 2),
    (8, 2, 2, 1, 1),
    (16, 2, 4, 2, 1),
    (12, 3, 4, 1, 2),
    (8, 8, 1, 1, 1),
)
_BATCHES += ((10, 2, 2, 1, 1), (2, 2, 2, 1, 1), (8, 2, 6, 4, 1))
add_cases(
    "my_accumulation",
    _BATCHES,
    _count_steps,
    call=_catch_value_error,
    equal=lambda got, want: got == want and type(got) is type(want),
    explain=lambda case, got, want: f"Right is {want!r}{', an int' if want == got else ''}.",
    success="Right, for 8 batches, three of which are impossible.",
)


# The settings that the exercise asks for: micro-batch, micro-batches, ranks, steps.
_MICRO, _MICRO_STEPS, _RANKS, _STEPS = 1, 2, 2, 4


def _get_batches(step: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    start = (step * _RANKS + rank) * _MICRO_STEPS
    tokens, targets = text.get_batch(64, _MICRO * _MICRO_STEPS, start=start)
    return list(zip(tokens.chunk(_MICRO_STEPS), targets.chunk(_MICRO_STEPS), strict=True))


def _run_engine(settings: Mapping[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = deepspeed_engine.initialize(GPT(PRESETS["nano"]), settings)
    found = {
        "micro": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "batch": engine.train_batch_size(),
        "stage": engine.zero_optimization_stage(),
        "clipping": engine.gradient_clipping(),
        "bf16": engine.bfloat16_enabled(),
        "overlap": engine.zero_overlap_comm(),
        "bucket": engine.zero_reduce_bucket_size(),
    }
    if found["accumulation"] == _MICRO_STEPS:
        batches = [_get_batches(step, dist.get_rank()) for step in range(_STEPS)]
        found["losses"] = [deepspeed_engine.step(engine, batch) for batch in batches]
    return found


def _train_one_process() -> list[float]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(PRESETS["nano"])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(_STEPS):
        parts = [pair for rank in range(_RANKS) for pair in _get_batches(step, rank)]
        tokens, targets = (torch.cat(side) for side in zip(*parts, strict=True))
        value = loss(model(tokens), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


_EXPECTED = {"micro": _MICRO, "accumulation": _MICRO_STEPS, "batch": _MICRO * _MICRO_STEPS * _RANKS}
_EXPECTED |= {"stage": 2, "bf16": False}


@add_exercise("deepspeed_config")
def _(answer: Any) -> str:
    try:
        deepspeed_engine.check_config(answer, optimizer=True)
    except ValueError as error:
        raise WrongAnswer(f"{error}.") from None
    found = run_answer(_run_engine, _RANKS, dict(answer), timeout=60)[0]
    for name, want in _EXPECTED.items():
        if found[name] != want:
            raise WrongAnswer(f"The engine's {name} is {found[name]} instead of {want}.")
    if found["clipping"]:
        raise WrongAnswer(
            f"The engine clips gradients at {found['clipping']}. What does DeepSpeed do when "
            "gradient_clipping is not set?"
        )
    if not found["overlap"]:
        raise WrongAnswer(
            "Communication does not overlap with backward: in stage 2, overlap_comm has to be set."
        )
    buckets = 2 * 4 * found["bucket"]  # two buckets of float32
    if not 0.5e6 <= buckets <= 1e6:
        raise WrongAnswer(f"The buckets take {buckets / 1e6:,.1f} MB instead of 0.5 to 1.")
    gap = max(abs(a - b) for a, b in zip(found["losses"], _train_one_process(), strict=True))
    if gap > 4.1e-5:  # 4 sqrt(256 tokens) 2^-24 of 5.5; a turned weight: 2 * 1e-3 * 0.01
        raise WrongAnswer(f"It trains, but its losses differ from one process's by {gap:.1g}.")
    return "Right: on two ranks DeepSpeed's engine has one process's losses in all four steps."


_CHOICES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "parameters")]


def _estimate_bytes(params: float, gpus: int, choice: tuple[int, str]) -> tuple[float, float]:
    """Return the bytes of model states on each GPU, and on the host for all GPUs together."""
    states = memory.estimate_states(
        params, Layout(dp=gpus, zero=choice[0], offload=choice[1]), "bf16"
    )
    return states.total, gpus * states.host


def _choose_stage(
    params: float, gpus: int, size: float, host: float, share: float = 0.7
) -> tuple[int, str] | None:
    for choice in _CHOICES:
        device, host_bytes = _estimate_bytes(params, gpus, choice)
        if device <= share * size and host_bytes <= host:
            return choice
    return None


# Parameters, GPUs, bytes of each GPU, bytes of the host that they share. Every answer occurs.
_JOBS = ((1e9, 8, 24e9, 1e12), (3e9, 8, 24e9, 1e12), (4e9, 8, 24e9, 1e12), (7e9, 8, 24e9, 1e12))
_JOBS += ((7e9, 8, 80e9, 1e12), (13e9, 2, 80e9, 1e12), (13e9, 4, 24e9, 1e12))
_JOBS += ((13e9, 4, 24e9, 200e9), (400e9, 8, 80e9, 2e12), (3.5e9, 8, 80e9, 1e12))
_JOBS += ((3.8e9, 8, 80e9, 1e12),)
add_cases(
    "my_choice",
    _JOBS,
    _choose_stage,
    mistakes={"States may take 70 % of a GPU.": partial(_choose_stage, share=1.0)},
    success="Right, for 11 jobs.",
)
