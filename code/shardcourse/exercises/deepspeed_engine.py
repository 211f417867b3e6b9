"""Exercises of the lesson `deepspeed_engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardcourse.exercises import Wrong, exercise
from shardcourse.exercises.forms import Number, blanks, cases, number, run_answer
from shardlab import deepspeed_engine, memory
from shardlab.common import text
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.layout import Layout

number("deepspeed_accumulation", 16, "micro-batches",
       says="Right: 512 = 4 × 16 × 8, since 64 GPUs hold 64 / (4 × 2) = 8 copies.", wrong={
    2: "That divides by all 64 GPUs. The eight that share one copy of the model compute the "
    "same sequences: only the copies count.",
    4: "There are two pipeline stages as well, and they share a copy.",
})  # fmt: skip

_COST = 8 * 2.5 / 3600 / 20_000 * 1e6
number("deepspeed_cost", _COST, "per million tokens", rel=0.01,
       says="Right: 20 per hour buy 72 million tokens.", wrong={
    _COST / 8: "All eight GPUs are paid for while the job runs.",
    _COST * 3600: "The price is for an hour, and the rate is for a second.",
})  # fmt: skip

# The exercise's log: ranks, sequences of each rank, tokens of a prompt and of the whole sequence;
# then the new tokens, and what a GPU costs while the job runs, times a million.
_N, _BATCH, _PROMPT, _WHOLE = 4, 8, 512, 576
_NEW, _GPU = _N * _BATCH * (_WHOLE - _PROMPT), 2.5 * 16.0 / 3600 * 1e6
_HOLDS = "How many bytes are 8.03e9 parameters in bf16, and what does a rank hold?"
blanks(
    "deepspeed_log",
    {
        "parallelism": "data",
        "tokens": Number(_NEW, "tokens", {
            _N * _BATCH * _PROMPT: "That is what the log says, and it counts the input.",
            _N * _BATCH * _WHOLE: "The output begins with the input, which nobody generated.",
        }),
        "price": Number(_N * _GPU / _NEW, "per million tokens", {
            _GPU / _NEW: "That pays for one GPU, and four worked.",
        }, 0.01),
    },
    says="Right: copies, 2,048 new tokens, and 32 times the price that the log states.",
    otherwise="Allowed are 'data', 'tensor', 'pipeline' and 'zero3'.",
    wrong={
        ("parallelism", "tensor"): f"Asked for, but it would cut the matrices in four. {_HOLDS}",
        ("parallelism", "zero3"): f"It would cut the weights in four. {_HOLDS}",
        ("parallelism", "pipeline"): f"It would cut the layers in four. {_HOLDS}",
    },
)  # fmt: skip


def _accumulation(train: int, micro: int, world: int, tp: int, pp: int) -> int | str:
    """Return the number of accumulation steps, or "a ValueError" if there is none."""
    copies, rest = divmod(world, tp * pp)
    steps, more = divmod(train, micro * copies) if copies else (0, 0)
    return steps if steps and not rest and not more else "a ValueError"


def _raising(answer: Callable[..., Any], *given: int) -> Any:
    try:
        return answer(*given)
    except ValueError:
        return "a ValueError"


# No accumulation steps fit the last three cases.
_TRAINED = (
    (512, 4, 64, 4, 2),
    (8, 2, 2, 1, 1),
    (16, 2, 4, 2, 1),
    (12, 3, 4, 1, 2),
    (8, 8, 1, 1, 1),
)
_TRAINED += ((10, 2, 2, 1, 1), (2, 2, 2, 1, 1), (8, 2, 6, 4, 1))
cases(
    "my_accumulation",
    _TRAINED,
    _accumulation,
    call=_raising,
    says="Right, on 8 batches, of which three cannot be.",
)


# The settings that the exercise asks for: micro-batch, micro-batches, ranks, steps.
_MICRO, _PARTS, _RANKS, _STEPS = 1, 2, 2, 4


def _batches(step: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens, targets = text.get_batch(64, _MICRO * _PARTS, start=(step * _RANKS + rank) * _PARTS)
    return list(zip(tokens.chunk(_PARTS), targets.chunk(_PARTS), strict=True))


def _engine(settings: Mapping[str, Any]) -> dict[str, Any]:
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
    if found["accumulation"] == _PARTS:
        found["losses"] = [
            deepspeed_engine.step(engine, _batches(step, dist.get_rank())) for step in range(_STEPS)
        ]
    return found


def _one_process() -> list[float]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(PRESETS["nano"])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(_STEPS):
        parts = [pair for rank in range(_RANKS) for pair in _batches(step, rank)]
        tokens, targets = (torch.cat(side) for side in zip(*parts, strict=True))
        value = loss(model(tokens), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


_WANTED = {"micro": _MICRO, "accumulation": _PARTS, "batch": _MICRO * _PARTS * _RANKS}
_WANTED |= {"stage": 2, "bf16": False}


@exercise("deepspeed_config")
def _(answer: Any) -> str:
    try:
        deepspeed_engine.check_config(answer, optimizer=True)
    except ValueError as error:
        raise Wrong(f"{error}.") from None
    found = run_answer(_engine, _RANKS, dict(answer), timeout=60)[0]
    for name, want in _WANTED.items():
        if found[name] != want:
            raise Wrong(f"The engine's {name} is {found[name]} instead of {want}.")
    if found["clipping"]:
        raise Wrong(
            f"The engine clips gradients at {found['clipping']}. What does DeepSpeed do when it is "
            "not told?"
        )
    if not found["overlap"]:
        raise Wrong(
            "Communication does not overlap with backward: in stage 2 it has to be asked for."
        )
    buckets = 2 * 4 * found["bucket"]  # two buckets of float32
    if not 0.5e6 <= buckets <= 1e6:
        raise Wrong(f"The buckets take {buckets / 1e6:,.1f} MB instead of 0.5 to 1.")
    gap = max(abs(a - b) for a, b in zip(found["losses"], _one_process(), strict=True))
    if gap > 1e-5:  # float32, losses near 5, four steps
        raise Wrong(f"It trains, but its losses are {gap:.1g} off those of one process.")
    return (
        "Right: DeepSpeed's engine ran it on two ranks; four steps have the losses of one process."
    )


_CHOICES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "parameters")]


def _held(params: float, gpus: int, choice: tuple[int, str]) -> tuple[float, float]:
    """Return the bytes of model states on each GPU, and on the host for all GPUs together."""
    states = memory.estimate_states(
        params, Layout(dp=gpus, zero=choice[0], offload=choice[1]), "bf16"
    )
    return states.total, gpus * states.host


def _choice(
    params: float, gpus: int, size: float, host: float, share: float = 0.7
) -> tuple[int, str] | None:
    for choice in _CHOICES:
        device, below = _held(params, gpus, choice)
        if device <= share * size and below <= host:
            return choice
    return None


# Parameters, GPUs, bytes of each GPU, bytes of the host that they share. Every answer occurs.
_JOBS = ((1e9, 8, 24e9, 1e12), (3e9, 8, 24e9, 1e12), (4e9, 8, 24e9, 1e12), (7e9, 8, 24e9, 1e12))
_JOBS += ((7e9, 8, 80e9, 1e12), (13e9, 2, 80e9, 1e12), (13e9, 4, 24e9, 1e12))
_JOBS += ((13e9, 4, 24e9, 200e9), (400e9, 8, 80e9, 2e12))
cases(
    "my_choice",
    _JOBS,
    _choice,
    mistakes={"States may take 70 % of a GPU.": partial(_choice, share=1.0)},
    says="Right, for 9 jobs.",
)
