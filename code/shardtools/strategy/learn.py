"""Rates fitted to files of measured steps, and predictions for each step of a file.

The table of throughputs has a column for a picture: each half of the rows as predicted from the
other half. After a change of the prediction, renew the rates and this column:

    python -m shardlab strategy fit code/shardtools/strategy/published/throughput.csv \\
        --profile engines --rates code/shardtools/strategy/published/rates_engines.json
    python -m shardtools.strategy.learn code/shardtools/strategy/published/throughput.csv
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

from .core import layer, seconds
from .files import (
    COLUMNS,
    THROUGHPUTS,
    case_job,
    case_measured,
    read_cases,
    read_rows,
    row_job,
    row_measured,
)
from .fit import Predict, fit
from .footprint import GIB, footprint
from .job import Job
from .predict import check_job, first_rank, of_job
from .profile import ENGINES, Profile
from .rates import Rates, Values, guesses

Measured = list[tuple[Predict, float]]
Run = tuple[Job, float | None, float | None]  # a job, its seconds, its bytes

# Rates that each kind of measurement can determine.
LAYER = "products", "memory", "elementwise", "scores", "node", "hidden"
MEMORY = "kept", "fragments", "logit", "late", "settled", "gathered", "fixed"
STEP = (
    "products", "attention", "memory", "elementwise", "launch", "crossing", "node", "hidden",
    "beyond", "network", "message", "exposed", "step", "hop",
)  # fmt: skip
OF_ENGINES = (
    "products", "attention", "memory", "elementwise", "launch", "node", "hidden", "network",
    "message", "exposed", "gathers", "fp8", "mxfp8", "nvfp4", "newer", "older", "narrow", "wide",
    "casts", "scan", "grouped", "rows", "routes", "deal", "travels", "eager", "torchtitan",
    "automodel", "fsdp",
)  # fmt: skip
OTHERS = "by_others_s"  # the table's column of `by_others`
ADDED = "predicted_seconds", "predicted_memory_gib", "note"  # columns added to a file


def fitted(source: Path, profile: Profile, left: list[str]) -> Rates:
    """Fit rates to a file; `left` gets a line for each row that is left out."""
    if source.suffix == ".json":
        return from_cases(read_cases("file", source), profile, source.name)
    return from_rows(_rows(source, profile), profile, source.name, left)


def _rows(path: Path, profile: Profile) -> list[dict[str, str]]:
    """Read a file's rows. Raises ValueError for a table of throughputs with another profile."""
    rows = read_rows("file", path)
    throughputs = bool(rows) and all(name in rows[0] for name in THROUGHPUTS)
    if throughputs != (profile.name == "engines"):
        allowed = "is 'engines', with a table of throughputs" if throughputs else "are the others"
        raise ValueError(f"profile={profile.name!r}: allowed {allowed}")
    return rows


def predicted_rows(path: Path, profile: Profile, rates: Rates) -> str:
    """Return a file's rows as CSV with predictions. Raises ValueError for a bad file."""
    values, rows = rates.values_of(), _rows(path, profile)
    columns = [name for name in (rows[0] if rows else COLUMNS) if name not in (None, *ADDED)]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *ADDED], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        found: dict[str, Any] = dict.fromkeys(ADDED, "")
        try:
            job = row_job(row, profile)
            # A job that needs slightly more than there is frees fragmented blocks, and continues.
            size = min(first_rank(job, values), job.machine.memory)
            found["predicted_seconds"] = f"{of_job(job, values).seconds.total:.6g}"
            found["predicted_memory_gib"] = f"{size / GIB:.4g}"
        except ValueError as error:
            found["note"] = str(error)
        writer.writerow({**row, **found})
    return text.getvalue()


def predicted_cases(path: Path, profile: Profile, rates: Rates) -> list[dict[str, Any]]:
    """Predict each case of a file, in order. Raises ValueError for a bad file."""
    values = rates.values_of()
    listed = []
    for case in read_cases("file", path):
        found: dict[str, Any] = {"id": case["id"], "seconds": None, "memory_gib": None, "note": ""}
        try:
            prediction = of_job(case_job(case["config"], profile), values)
            found["seconds"] = float(f"{prediction.seconds.total:.6g}")
            found["memory_gib"] = float(f"{prediction.memory.allocated / GIB:.4g}")
        except ValueError as error:
            found["note"] = str(error)
        listed.append(found)
    return listed


def from_rows(
    rows: Iterable[Mapping[str, Any]], profile: Profile, origin: str, left: list[str] | None = None
) -> Rates:
    """Fit rates to the rows that can be expressed, and that have seconds or bytes.

    Runs whose column `state` is not "steady" are left out.
    left: gets a sentence for each row that is left out, counted as in a file, from 2.

    Raises ValueError if no row remains.
    """
    jobs: list[Run] = []
    for line, row in enumerate(rows, 2):
        try:
            job = row_job(row, profile)
            check_job(job)
            measured = row_measured(row, job)
            if not any(measured):
                raise ValueError("neither seconds of a step nor bytes are there")
            if (state := row.get("state") or "steady") != "steady":
                raise ValueError(f"state={state!r}")
            jobs.append((job, *measured))
        except ValueError as error:
            if left is not None:
                left.append(f"line {line} is left out: {error}")
    return _of_runs(jobs, profile, origin)


def from_cases(cases: Iterable[Mapping[str, Any]], profile: Profile, origin: str) -> Rates:
    """Fit rates to the layer times of published cases, or to step times if there are none.

    Raises ValueError if no case has either.
    """
    layers: Measured = []
    jobs: list[Run] = []
    for case in cases:
        try:
            printed = case_measured(case)
            job = case_job(case["config"], profile)
            check_job(job)
        except ValueError:
            continue
        if "fwd_ms" in printed and "bwd_ms" in printed:
            for k, name in enumerate(("fwd_ms", "bwd_ms")):
                layers.append((_layer(job, k), printed[name] / 1e3))
        elif time := printed.get("iter_s") or printed.get("iter_ms", 0) / 1e3:
            jobs.append((job, time, None))
    if layers:
        words = f"fitted on {len(layers)} layer times: {origin}"
        return fit(guesses(profile.name), layers, LAYER, words)
    return _of_runs(jobs, profile, origin)


def _of_runs(runs: Sequence[Run], profile: Profile, origin: str) -> Rates:
    """Fit rates to runs' bytes, and then to their seconds."""
    rates = guesses(profile.name)
    if sizes := [(_reserves(job), size) for job, _, size in runs if size]:
        rates = fit(rates, sizes, MEMORY, f"fitted on the memory of {len(sizes)} runs: {origin}")
    known = rates.values_of()
    steps = [(_takes(job, known), time) for job, time, _ in runs if time]
    if not steps and sizes:
        return rates
    words = f"fitted on the seconds of {len(steps)} runs: {origin}"
    if profile.name == "engines":
        return fit(rates, steps, OF_ENGINES, words, rounds=8)
    return fit(rates, steps, STEP, words)


def _layer(job: Job, k: int) -> Predict:
    return lambda rates: layer(job, Values(**rates))[k].total


def _takes(job: Job, known: Values) -> Predict:
    needed = footprint(job, known).needed
    return lambda rates: seconds(job, Values(**rates), needed).total


def _reserves(job: Job) -> Predict:
    return lambda rates: footprint(job, Values(**rates)).reserved


def by_others(rows: Sequence[Mapping[str, Any]], seed: int = 1) -> list[float]:
    """Return the predicted seconds of each row of a table of throughputs.

    Rows are shuffled with `seed`, and halved: each half is predicted with rates that are fitted to
    the other half.
    """
    places = list(range(len(rows)))
    random.Random(seed).shuffle(places)
    halves = places[::2], places[1::2]
    found = {}
    for half, other in (halves, halves[::-1]):
        rates = from_rows([rows[place] for place in sorted(other)], ENGINES, "the other half")
        values = rates.values_of()
        found |= {place: seconds(row_job(rows[place], ENGINES), values).total for place in half}
    return [found[place] for place in range(len(rows))]


if __name__ == "__main__":  # put `by_others` into the last column of a table
    path = Path(sys.argv[1])
    rows = read_rows("table", path)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row, time in zip(rows, by_others(rows), strict=True):
        writer.writerow(row | {OTHERS: f"{time:.4g}"})
    options.written("table", path, text.getvalue())
