"""Predicted step times of engines, compared with published ones that no rate was fitted on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import median

import pytest

from shardlab.common.shapes import PRESETS
from shardtools.strategy import MACHINES, PROFILES, Layout, fit_runs, measured_runs, models, predict
from shardtools.strategy.profile import ENGINES
from shardtools.strategy.rates import DATA_DIR, load_rates

TABLE = DATA_DIR / "throughput.csv"
ROWS = measured_runs.read_rows("rows", TABLE)
JOBS = [measured_runs.row_to_job(row, ENGINES) for row in ROWS]
TAKEN = [measured_runs.row_to_measurement(row, job)[0] for row, job in zip(ROWS, JOBS, strict=True)]


def median_errors(others: list[float]) -> dict[str, float]:
    """Return the median error of each half of the table, predicted from the other half.

    The medians are by dtype of the products and presence of experts, and by source.
    """
    groups = defaultdict(list)
    for row, job, taken, other in zip(ROWS, JOBS, TAKEN, others, strict=True):
        kind = "with experts" if job.model.experts else "dense"
        for name in (kind if job.dtype == "bf16" else "8 bits", row["source"].split(" (")[0]):
            groups[name].append(abs(other / taken - 1))
    return {name: median(errors) for name, errors in groups.items()}


def test_each_half_of_the_table_is_predicted_by_the_other() -> None:
    """The table stores these predictions for a picture. Median errors, rounded up: 6, 12, 10 %.

    By source at most 29 %, NeMo Automodel's: one fitted factor sets all its eight step times, and
    another half gives another factor. Over several halves it is 18 %: see the test below.
    """
    found = median_errors([float(row["cross_validated_s"]) for row in ROWS])
    assert found.pop("dense") < 0.08
    assert found.pop("with experts") < 0.15
    assert found.pop("8 bits") < 0.125
    assert len(found) == 7 and max(found.values()) < 0.30
    assert sorted(found.values())[-2] < 0.20


@pytest.mark.weekly("ten fits")
def test_other_random_halves_are_predicted() -> None:
    """Five random halves, the table's first: the median of each median over them."""
    first, *more = (fit_runs.cross_validate(ROWS, seed) for seed in range(1, 6))
    assert [float(row["cross_validated_s"]) for row in ROWS] == pytest.approx(first, rel=2e-3)
    each = [median_errors(others) for others in (first, *more)]
    found = {name: median(one[name] for one in each) for name in each[0]}
    assert found.pop("dense") < 0.10 and found.pop("8 bits") < 0.20
    assert found.pop("with experts") < 0.15
    assert max(found.values()) < 0.25
    assert median(max(v for name, v in one.items() if name in found) for one in each) < 0.25


def test_the_rates_that_come_with_the_course_are_those_of_the_table() -> None:
    kept, found = load_rates("engines"), fit_runs.fit_rows(ROWS, ENGINES, TABLE.name)
    assert list(kept) == list(found)
    for rate in found:
        assert kept[rate] == pytest.approx(found[rate], rel=1e-6)
        assert kept.by_name[rate].origin == found.by_name[rate].origin
    assert len(ROWS) == 279


def test_models_are_what_the_hub_counts() -> None:
    # MODELS of the table -> the totals of transformers' classes.
    totals = {
        "deepseek-v3": 671_026_404_352, "kimi-k2": 1_026_408_209_408,
        "gpt-oss-20b": 20_914_757_184, "qwen3-30b-a3b": 30_532_122_624,
        "qwen3-next-80b-a3b": 79_674_391_296, "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496, "llama-3.2-1b": 1_235_814_400,
    }  # fmt: skip
    for name, total in totals.items():
        assert models.find_model(name).num_params == total


# ------------------------------------------------------------------- torchtitan, as it is emitted


def test_eager_compiled_and_captured_steps_differ() -> None:
    """torchtitan's Table 1: 8B on eight GPUs, 5,762 tokens/s each in eager mode, 6,667 compiled."""
    titan, at = PROFILES["torchtitan"], Layout(8, zero=3, micro_batch=2, recompute="norms+ffn")
    config, chip = PRESETS["llama-3-8b"], MACHINES["h100-96"]
    ways = ({"is_compiled": False, "captures_graph": False}, {"captures_graph": False}, {})
    taken = [predict(config, chip, at, replace(titan, **way)).seconds.total for way in ways]
    each = [2 * 8192 / step for step in taken]
    assert each[0] == pytest.approx(5762, rel=0.10)
    assert each[1] == pytest.approx(6667, rel=0.10)
    assert each[0] < each[1] <= each[2]
