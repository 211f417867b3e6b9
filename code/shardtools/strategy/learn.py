"""Files of measured steps: the rates that they tell, and what rates predict of each step.

What each half of the published table is predicted by the other, the table keeps for a picture. With
the rates, after a change of what is predicted:

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

from . import tables
from .core import layer, seconds
from .files import (
    COLUMNS,
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
from .predict import check_job, check_rates, first_rank, of_job
from .profile import Profile
from .rates import Rates, Values, guesses

Measured = list[tuple[Predict, float]]

# Which rates each kind of measurement can tell something about.
LAYER = "products", "memory", "elementwise", "scores", "node", "hidden"
STEP = (
    "products", "attention", "memory", "elementwise", "launch", "crossing", "node", "hidden",
    "beyond", "network", "message", "exposed", "step", "hop",
)  # fmt: skip
ENGINES = (
    "products", "attention", "memory", "elementwise", "launch", "node", "hidden", "network",
    "message", "exposed", "gathers", "fp8", "mxfp8", "nvfp4", "newer", "older", "narrow", "wide",
    "casts", "scan", "grouped", "rows", "routes", "deal", "travels", "eager", "torchtitan",
    "automodel", "fsdp",
)  # fmt: skip
OTHERS = "by_others_s"  # the column of a table
ADDED = "predicted_seconds", "predicted_memory_gib", "note"  # to the columns of a file
MEMORY = "kept", "fragments", "logit", "late", "settled", "gathered", "fixed"


def fitted(source: Path, profile: Profile, left: list[str]) -> Rates:
    """The rates that a file tells; `left` gets a line for each of its lines that tells none."""
    if source.suffix == ".json":
        return from_cases(read_cases("file", source), profile, source.name)
    rows = read_rows("file", source)
    if not tables.of_throughputs(rows, profile):
        return from_rows(rows, profile, source.name)
    rates, out = from_table(rows, source.name)
    left += [f"line {line} is left out: {why}" for line, why in out]
    return rates


def predicted_rows(path: Path, profile: Profile, rates: Rates) -> str:
    """The CSV file with what is predicted of each row, in order. Raises ValueError for the file."""
    rows = read_rows("file", path)
    values = check_rates(profile, rates)
    published = tables.of_throughputs(rows, profile)
    columns = [name for name in (rows[0] if rows else COLUMNS) if name not in (None, *ADDED)]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *ADDED], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        found: dict[str, Any] = dict.fromkeys(ADDED, "")
        try:
            job = tables.row_job(row) if published else row_job(row, profile)
            # A job that needs a little more gives back what it lost to fragments, and goes on.
            size = min(first_rank(job, values), job.machine.memory)
            found["predicted_seconds"] = f"{of_job(job, values).seconds.total:.6g}"
            found["predicted_memory_gib"] = f"{size / GIB:.4g}"
        except ValueError as error:
            found = dict.fromkeys(ADDED, "") | {"note": str(error)}
        writer.writerow({**row, **found})
    return text.getvalue()


def predicted_cases(path: Path, profile: Profile, rates: Rates) -> list[dict[str, Any]]:
    """What is predicted of each case, in order. Raises ValueError for the file."""
    values = check_rates(profile, rates)
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


def from_rows(rows: Iterable[Mapping[str, Any]], profile: Profile, origin: str) -> Rates:
    """Rates by the rows of a sweep that can be expressed, and that tell seconds or bytes.

    Runs that the file's column `state` calls other than "steady" say nothing about others.

    Raises ValueError where none does.
    """
    jobs = []
    for row in rows:
        if (row.get("state") or "steady") != "steady":
            continue
        try:
            job = row_job(row, profile)
            check_job(job)
            jobs.append((job, *row_measured(row)))
        except ValueError:
            continue  # its reason is given where it is predicted
    rates = guesses(profile.name)
    if sizes := [(_reserves(job), size) for job, _, size in jobs if size]:
        rates = fit(rates, sizes, MEMORY, f"fitted on the memory of {len(sizes)} runs: {origin}")
    known = rates.values_of()
    steps = [(_takes(job, known), time) for job, time, _ in jobs if time]
    if not steps and sizes:
        return rates
    return fit(rates, steps, STEP, f"fitted on the seconds of {len(steps)} runs: {origin}")


def from_table(
    rows: Iterable[Mapping[str, Any]], origin: str, rounds: int = 8
) -> tuple[Rates, list[tuple[int, str]]]:
    """Rates of today's engines by a table of throughputs; and which lines say nothing, and why.

    Lines are counted from 2, as a file's are whose first has the names of its columns.
    Raises ValueError where none tells anything.
    """
    steps: Measured = []
    left = []
    rates = guesses("engines")
    known = rates.values_of()
    for line, row in enumerate(rows, 2):
        try:
            job = tables.row_job(row)
            steps.append((_takes(job, known), tables.measured(row, job)))
        except ValueError as error:
            left.append((line, str(error)))
    words = f"fitted on {len(steps)} steps of today's engines: {origin}"
    return fit(rates, steps, ENGINES, words, rounds), left


def by_others(rows: Sequence[Mapping[str, Any]], seed: int = 1) -> dict[int, float]:
    """Seconds of each line of a table of throughputs that can be predicted, by its place in it.

    Lines are shuffled, as `seed` has it, and halved: each half is predicted by rates that are
    fitted on the other. Raises ValueError where a half tells nothing.
    """
    jobs = {}
    for place, row in enumerate(rows):
        try:
            job = tables.row_job(row)
            tables.measured(row, job)
        except ValueError:
            continue  # `from_table` says why
        jobs[place] = job
    shuffled = list(jobs)
    random.Random(seed).shuffle(shuffled)
    halves = shuffled[::2], shuffled[1::2]
    found = {}
    for half, other in (halves, halves[::-1]):
        rates = from_table([rows[place] for place in sorted(other)], "the other half")[0]
        values = rates.values_of()
        found |= {place: seconds(jobs[place], values).total for place in half}
    return found


def write_by_others(path: Path) -> None:
    """Put `by_others` into the last column of a table. Raises ValueError for others."""
    rows = read_rows("table", path)
    found = by_others(rows)
    kept = [row | {OTHERS: f"{found[n]:.4g}" if n in found else ""} for n, row in enumerate(rows)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(kept[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    options.written("table", path, text.getvalue())


def from_cases(cases: Iterable[Mapping[str, Any]], profile: Profile, origin: str) -> Rates:
    """Rates by the layer times among published cases, or by their step times where there are none.

    Raises ValueError where no case has either.
    """
    layers: Measured = []
    steps: Measured = []
    guessed = guesses(profile.name)
    known = guessed.values_of()
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
            steps.append((_takes(job, known), time))
    measured, free, what = (layers, LAYER, "layer") if layers else (steps, STEP, "step")
    return fit(guessed, measured, free, f"fitted on {len(measured)} {what} times: {origin}")


def _layer(job: Job, k: int) -> Predict:
    return lambda rates: layer(job, Values(**rates))[k].total


def _takes(job: Job, known: Values) -> Predict:
    needed = footprint(job, known).needed
    return lambda rates: seconds(job, Values(**rates), needed).total


def _reserves(job: Job) -> Predict:
    return lambda rates: footprint(job, Values(**rates)).reserved


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_by_others(Path(name))
