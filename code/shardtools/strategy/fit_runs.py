"""Rates fitted to files of measured steps, and predictions for each step of a file.

The table of throughputs has a column for a picture: step times of each half of the rows, predicted
with rates of the other half. After a change of the prediction, renew the rates and this column:

    python -m shardlab strategy fit code/shardtools/strategy/published/throughput.csv \\
        --profile engines --rates code/shardtools/strategy/published/rates_engines.json
    python -m shardtools.strategy.fit_runs code/shardtools/strategy/published/throughput.csv
"""

from __future__ import annotations

import csv
import io
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtools import options

from . import measured_runs
from .core import predict_layer, predict_seconds
from .fit import Predictor, fit
from .footprint import GIB, predict_memory
from .job import Job
from .predict import check_job, predict_job, predict_rank0_bytes
from .profile import ENGINES, Profile
from .rates import Rates, RateValues, guess_rates

Row = Mapping[str, Any]
Measured = list[tuple[Predictor, float]]
Run = tuple[Job, float | None, float | None]  # a job, its seconds, its bytes

# Rates that each kind of measurement can determine.
LAYER_RATES = "products", "memory", "elementwise", "scores", "node", "overlapped_collectives"
MEMORY_RATES = (
    "saved_bytes", "fragments", "logit_bytes", "late_buffers", "settling_microbatches",
    "gather_buffers", "overhead",
)  # fmt: skip
STEP_RATES = (
    "products", "attention", "memory", "elementwise", "launch", "crossing", "node",
    "overlapped_collectives", "extra_node", "network", "message_latency", "exposed_reduce", "step",
    "gather_latency",
)  # fmt: skip
ENGINE_RATES = (
    "products", "attention", "memory", "elementwise", "launch", "node", "overlapped_collectives",
    "network", "message_latency", "exposed_reduce", "exposed_gathers", "fp8", "mxfp8", "nvfp4",
    "fp4_gpus", "pre_fp8_gpus", "narrow_heads", "mlp_passes", "cast_passes", "scan",
    "grouped_matmul", "half_rate_rows", "permute_passes", "expert_launch", "exposed_all_to_all",
    "eager", "torchtitan", "automodel", "fsdp",
)  # fmt: skip
CROSS_VALIDATED_COLUMN = "cross_validated_s"  # the table's column of `cross_validate`
PREDICTION_COLUMNS = "predicted_seconds", "predicted_memory_gib", "note"  # columns added to a file


def fit_file(source: Path, profile: Profile, skipped: list[str]) -> Rates:
    """Fit rates to a file; `skipped` gets a line for each row that is left out."""
    if source.suffix == ".json":
        return fit_cases(measured_runs.read_cases("file", source), profile, source.name)
    return fit_rows(_read_table(source, profile), profile, source.name, skipped)


def _read_table(path: Path, profile: Profile) -> list[dict[str, str]]:
    rows = measured_runs.read_rows("file", path)
    throughputs = bool(rows) and all(name in rows[0] for name in measured_runs.THROUGHPUT_COLUMNS)
    if throughputs != (profile.name == "engines"):
        words = "must be 'engines'" if throughputs else "must not be 'engines'"
        kind = "a table of throughputs" if throughputs else "a sweep"
        raise ValueError(f"profile={profile.name!r}: {words}, since the file is {kind}")
    return rows


def predict_rows(path: Path, profile: Profile, rates: Rates) -> str:
    """Return a file's rows as CSV with predictions. Raises ValueError for a bad file."""
    values, rows = rates.to_values(), _read_table(path, profile)
    given = rows[0] if rows else measured_runs.SWEEP_COLUMNS
    columns = [name for name in given if name not in (None, *PREDICTION_COLUMNS)]
    columns += PREDICTION_COLUMNS
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        added: dict[str, Any] = dict.fromkeys(PREDICTION_COLUMNS, "")
        try:
            job = measured_runs.row_to_job(row, profile)
            # A job that needs slightly more frees fragmented blocks, and continues.
            size = min(predict_rank0_bytes(job, values), job.machine.memory)
            added["predicted_seconds"] = f"{predict_job(job, values).seconds.total:.6g}"
            added["predicted_memory_gib"] = f"{size / GIB:.4g}"
        except ValueError as error:
            added["note"] = str(error)
        writer.writerow({**row, **added})
    return text.getvalue()


def predict_cases(path: Path, profile: Profile, rates: Rates) -> list[dict[str, Any]]:
    """Predict each case of a file, in order. Raises ValueError for a bad file."""
    values = rates.to_values()
    results = []
    for case in measured_runs.read_cases("file", path):
        result: dict[str, Any] = {"id": case["id"], "seconds": None, "memory_gib": None, "note": ""}
        try:
            prediction = predict_job(measured_runs.case_to_job(case["config"], profile), values)
            result["seconds"] = float(f"{prediction.seconds.total:.6g}")
            result["memory_gib"] = float(f"{prediction.memory.allocated / GIB:.4g}")
        except ValueError as error:
            result["note"] = str(error)
        results.append(result)
    return results


def fit_rows(
    rows: Iterable[Row], profile: Profile, origin: str, skipped: list[str] | None = None
) -> Rates:
    """Fit rates to the rows that can be expressed, and that have seconds or bytes.

    Runs whose column `state` is not "steady" are left out.
    skipped: gets a sentence for each row that is left out, counted as in a file, from 2.

    Raises ValueError if no row remains.
    """
    jobs: list[Run] = []
    for line, row in enumerate(rows, 2):
        try:
            job = measured_runs.row_to_job(row, profile)
            check_job(job)
            measured = measured_runs.row_to_measurement(row, job)
            if not any(measured):
                raise ValueError("has neither seconds of a step nor bytes")
            if (state := row.get("state") or "steady") != "steady":
                raise ValueError(f'state={state!r}: must be "steady"')
            jobs.append((job, *measured))
        except ValueError as error:
            if skipped is not None:
                skipped.append(f"line {line} is left out: {error}")
    return _fit_runs(jobs, profile, origin)


def fit_cases(cases: Iterable[Row], profile: Profile, origin: str) -> Rates:
    """Fit rates to the layer times of published cases, or to step times if there are none.

    Raises ValueError if no case has either.
    """
    layers: Measured = []
    jobs: list[Run] = []
    for case in cases:
        try:
            printed = measured_runs.case_to_times(case)
            job = measured_runs.case_to_job(case["config"], profile)
            check_job(job)
        except ValueError:
            continue
        if "fwd_ms" in printed and "bwd_ms" in printed:
            for k, name in enumerate(("fwd_ms", "bwd_ms")):
                layers.append((_layer_predictor(job, k), printed[name] / 1e3))
        elif time := printed.get("iter_s") or printed.get("iter_ms", 0) / 1e3:
            jobs.append((job, time, None))
    if layers:
        words = f"fitted on {len(layers)} layer times: {origin}"
        return fit(guess_rates(profile.name), layers, LAYER_RATES, words)
    return _fit_runs(jobs, profile, origin)


def _fit_runs(runs: Sequence[Run], profile: Profile, origin: str) -> Rates:
    rates = guess_rates(profile.name)
    if sizes := [(_memory_predictor(job), size) for job, _, size in runs if size]:
        words = f"fitted on the memory of {len(sizes)} runs: {origin}"
        rates = fit(rates, sizes, MEMORY_RATES, words)
    known = rates.to_values()
    steps = [(_step_predictor(job, known), time) for job, time, _ in runs if time]
    if not steps and sizes:
        return rates
    words = f"fitted on the seconds of {len(steps)} runs: {origin}"
    if profile.name == "engines":
        return fit(rates, steps, ENGINE_RATES, words, rounds=8)
    return fit(rates, steps, STEP_RATES, words)


def _layer_predictor(job: Job, k: int) -> Predictor:
    return lambda rates: predict_layer(job, RateValues(**rates))[k].total


def _step_predictor(job: Job, known: RateValues) -> Predictor:
    needed = predict_memory(job, known).required_bytes
    return lambda rates: predict_seconds(job, RateValues(**rates), needed).total


def _memory_predictor(job: Job) -> Predictor:
    return lambda rates: predict_memory(job, RateValues(**rates)).reserved


def cross_validate(rows: Sequence[Row], seed: int = 1) -> list[float]:
    """Return the predicted seconds of each row of a table of throughputs.

    Rows are shuffled with `seed`, and halved: each half is predicted with rates that are fitted to
    the other half.
    """
    places = list(range(len(rows)))
    random.Random(seed).shuffle(places)
    halves = places[::2], places[1::2]
    predicted = {}
    for half, other in (halves, halves[::-1]):
        rates = fit_rows([rows[place] for place in sorted(other)], ENGINES, "the other half")
        values = rates.to_values()
        jobs = {place: measured_runs.row_to_job(rows[place], ENGINES) for place in half}
        predicted |= {place: predict_seconds(job, values).total for place, job in jobs.items()}
    return [predicted[place] for place in range(len(rows))]


if __name__ == "__main__":  # put `cross_validate` into the last column of a table
    path = Path(sys.argv[1])
    rows = measured_runs.read_rows("table", path)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row, time in zip(rows, cross_validate(rows), strict=True):
        writer.writerow(row | {CROSS_VALIDATED_COLUMN: f"{time:.4g}"})
    options.write_file("table", path, text.getvalue())
