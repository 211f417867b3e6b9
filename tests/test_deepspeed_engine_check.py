"""The exercises of lesson `deepspeed_engine` help with the wrong answers that readers give."""

from __future__ import annotations

from typing import Any

import pytest

from shardlab import memory
from shardlab.check import check
from shardlab.layout import Layout

RIGHT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 125_000},
    "zero_allow_untested_optimizer": True,
}
LADDER = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "parameters")]


def wrong(answer: Any, name: str, words: str) -> None:
    verdict = check(answer, name)
    assert not verdict.ok and words in verdict.message, verdict


def test_right_numbers() -> None:
    assert check(16, "deepspeed_accumulation").ok
    assert check(0.278, "deepspeed_cost").ok


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (2, "only the copies count"),
        (4, "pipeline stages"),
        (128, "several copies"),
        (17, "is too large"),
    ],
)
def test_accumulation(answer: Any, words: str) -> None:
    wrong(answer, "deepspeed_accumulation", words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (2.5 * 50 / 3600, "All eight GPUs"),
        (8 * 2.5 * 50, "for an hour"),
        (8 * 8 * 2.5 * 50 / 3600, "all eight GPUs together"),
        (3600 / (8 * 2.5 * 50), "other way up"),
    ],
)
def test_cost(answer: Any, words: str) -> None:
    wrong(answer, "deepspeed_cost", words)


SECONDS = 4 * 2.5 / 3600 * 16  # of four GPUs, in money
PRICE = SECONDS / 2048 * 1e6


def test_log_right() -> None:
    assert check(("data", 2048, PRICE), "deepspeed_log").ok
    assert check(["data", 2048.0, 21.7], "deepspeed_log").ok


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("data", "Give three things"),
        (2048, "Give three things"),
        (("data", 2048), "Give three things"),
        (("data", 2048, ...), "still missing"),
        (("tensor", 2048, PRICE), "asked for it"),
        (("zero3", 2048, PRICE), "a quarter of the weights"),
        (("pipeline", 2048, PRICE), "a quarter of the layers"),
        (("DDP", 2048, PRICE), "allowed are 'data'"),
        ((["data"], 2048, PRICE), "allowed are 'data'"),
        (("data", 16384, PRICE), "counts the input"),
        (("data", 18432, PRICE), "begins with the input"),
        (("data", 512, PRICE), "one rank's"),
        (("data", 64, PRICE), "one sequence"),
        (("data", "2048", PRICE), "number"),
        (("data", 2048, PRICE / 4), "pays for one GPU"),
        (("data", 2048, 0.68), "the log's"),
        (("data", 2048, SECONDS / 16384 * 1e6), "tokens of the input"),
        (("data", 2048, SECONDS / 18432 * 1e6), "input and output together"),
        (("data", 2048, SECONDS / 2048), "a million, please"),
        (("data", 2048, PRICE * 3600), "for an hour"),
    ],
)
def test_log(answer: Any, words: str) -> None:
    wrong(answer, "deepspeed_log", words)


def accumulation(train_batch: int, micro_batch: int, world_size: int, tp: int, pp: int) -> int:
    copies, rest = divmod(world_size, tp * pp)
    steps, more = divmod(train_batch, micro_batch * copies)
    if rest or more or not steps:
        raise ValueError("does not fit")
    return steps


def all_ranks_are_copies(train: int, micro: int, world: int, tp: int, pp: int) -> int:
    return train // (micro * world)


def rounds_down(train: int, micro: int, world: int, tp: int, pp: int) -> int:
    return train // (micro * (world // (tp * pp)))


def not_whole(train: int, micro: int, world: int, tp: int, pp: int) -> float:
    return train / (micro * (world / (tp * pp)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (all_ranks_are_copies, "share a copy of the model count once"),
        (rounds_down, "raise ValueError rather than"),
        (not_whole, "DeepSpeed wants an int"),
    ],
)
def test_arithmetic(answer: Any, words: str) -> None:
    wrong(answer, "my_accumulation", words)


def test_arithmetic_right() -> None:
    assert check(accumulation, "my_accumulation").ok


def test_config_right_also_with_the_whole_batch() -> None:
    assert check(RIGHT | {"train_batch_size": 4}, "deepspeed_config").ok


def section(**changes: Any) -> dict[str, Any]:
    return {"zero_optimization": RIGHT["zero_optimization"] | changes}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gradient_clipping": None}, "when it is not told"),
        ({"zero_optimization": {"stage": 1}}, "stage is 1 instead of 2"),
        ({"gradient_accumulation_steps": None}, "after 1 micro-batches instead of 2"),
        ({"gradient_cliping": 0.0}, "perhaps meant: 'gradient_clipping'"),
        ({"bf16": {"enabled": True}}, "float32 was asked for"),
        (section(overlap_comm=False), "Communication does not overlap"),
        (section(reduce_bucket_size=500_000_000), "take 4,000.0 MB instead of 0.5 to 1"),
        (section(reduce_bucket_size=250_000), "With overlap there are two of them"),
        (section(reduce_bucket_size=1_000_000), "counts numbers, not bytes"),
        (section(reduce_bucket_size=10_000), "take 0.1 MB"),
    ],
)
def test_config(change: dict[str, Any], words: str) -> None:
    changed = {name: value for name, value in (RIGHT | change).items() if value is not None}
    wrong(changed, "deepspeed_config", words)


def test_config_is_a_dict() -> None:
    wrong("ds_config.json", "deepspeed_config", "should be a dict")


def chosen(share: float, whole_host: bool = True, ladder: list[tuple[int, str]] = LADDER) -> Any:
    def my_choice(params: float, gpus: int, gpu: float, host: float) -> tuple[int, str] | None:
        for zero, offload in ladder:
            states = memory.states(params, Layout(dp=gpus, zero=zero, offload=offload), "bf16")
            below = states.host * (gpus if whole_host else 1)
            if states.total <= share * gpu and below <= host:
                return zero, offload
        return None

    return my_choice


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (chosen(1.0), "more than 70 % of it"),
        (chosen(0.7, whole_host=False), "share its memory"),
        (chosen(0.7, ladder=LADDER[::-1]), "something earlier in the list"),
        (chosen(0.7, ladder=LADDER[:4]), "there is a setting that fits"),
    ],
)
def test_choice(answer: Any, words: str) -> None:
    wrong(answer, "my_choice", words)


def test_choice_right() -> None:
    assert check(chosen(0.7), "my_choice").ok
