"""Files of measured steps: the rates that they tell, and what rates predict of each step.

What `strategy fit` and `strategy predict` do, which no page's calculator needs.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from . import files, learn, tables
from .footprint import GIB
from .predict import check_rates, first_rank, of_job
from .profile import Profile
from .rates import Rates

ADDED = "predicted_seconds", "predicted_memory_gib", "note"


def fitted(source: Path, profile: Profile, left: list[str]) -> Rates:
    """The rates that a file tells; `left` gets a line for each of its lines that tells none."""
    if source.suffix == ".json":
        return learn.from_cases(files.read_cases("file", source), profile, source.name)
    rows = files.read_rows("file", source)
    if not tables.of_throughputs(rows, profile):
        return learn.from_rows(rows, profile, source.name)
    rates, out = learn.from_table(rows, source.name)
    left += [f"line {line} is left out: {why}" for line, why in out]
    return rates


def predicted_rows(path: Path, profile: Profile, rates: Rates) -> str:
    """The CSV file with what is predicted of each row, in order. Raises ValueError for the file."""
    rows = files.read_rows("file", path)
    values = check_rates(profile, rates)
    published = tables.of_throughputs(rows, profile)
    columns = [name for name in (rows[0] if rows else files.COLUMNS) if name not in (None, *ADDED)]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *ADDED], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        found: dict[str, Any] = dict.fromkeys(ADDED, "")
        try:
            job = tables.row_job(row) if published else files.row_job(row, profile)
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
    for case in files.read_cases("file", path):
        found: dict[str, Any] = {"id": case["id"], "seconds": None, "memory_gib": None, "note": ""}
        try:
            prediction = of_job(files.case_job(case["config"], profile), values)
            found["seconds"] = float(f"{prediction.seconds.total:.6g}")
            found["memory_gib"] = float(f"{prediction.memory.allocated / GIB:.4g}")
        except ValueError as error:
            found["note"] = str(error)
        listed.append(found)
    return listed
