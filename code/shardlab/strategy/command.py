"""`python -m shardlab strategy`: which layout, how long it takes, and whether it fits.

    python -m shardlab strategy --fit sweep.csv --rates rates.json --profile nanotron
    python -m shardlab strategy --predict rows.csv --rates rates.json --profile nanotron
    python -m shardlab strategy --case cases.json --rates rates.json --profile megatron

--fit finds rates from measured steps (CSV with the columns of the Ultra-Scale sweep) or from layer
times (JSON, a list of cases with "id", "config" and "published") and writes them.

--predict prints the rows of a CSV file with predicted_seconds of a step, predicted_memory_gib that
rank 0 reserves, and a note: why a row cannot be expressed; its numbers are then empty.

--case prints a JSON list of {"id", "seconds", "memory_gib", "note"}; the memory is what is
allocated on the fullest rank, without what an allocator loses.

Each takes --profile: whose implementation is predicted.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

from shardlab import options

from . import files, learn
from .footprint import GIB
from .predict import check_rates, first_rank, of_job
from .profile import PROFILES, Profile
from .rates import Rates, read

ENTRIES = "fit", "predict", "case"
ADDED = "predicted_seconds", "predicted_memory_gib", "note"


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `strategy` to the command line."""
    words = "which layout: seconds and bytes of a step, predicted"
    parser = options.command(commands, "strategy", words, __doc__)
    add = partial(options.add, parser)
    add("fit", "measured steps (CSV) or layer times (JSON), to find rates from", "FILE")
    add("predict", "rows to predict (CSV)", "FILE")
    add("case", "cases to predict (JSON)", "FILE")
    add("rates", "rates: written by --fit, read by the others", "FILE")
    add("profile", f"whose implementation: {', '.join(PROFILES)}", "NAME")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(chosen).items() if value is not None}
    entries = [name for name in ENTRIES if name in given]
    if len(entries) != 1:
        said = " and ".join(f"--{name}" for name in entries) or "neither"
        raise ValueError(f"{said}: allowed is exactly one of --fit, --predict and --case")
    if not given.get("rates"):
        raise ValueError(f"rates='': allowed with --{entries[0]} is a file")
    if entries == ["fit"]:
        return _fit(given)
    profile, rates = _rates(given)
    if entries == ["predict"]:
        print(predicted_rows(Path(given["predict"]), profile, rates), end="")
    else:
        print(json.dumps(predicted_cases(Path(given["case"]), profile, rates), indent=1))
    return 0


def _profile(given: dict[str, Any]) -> Profile:
    name = given.get("profile", "")
    if name not in PROFILES:
        raise ValueError(f"profile={name!r}: allowed are {', '.join(PROFILES)}")
    return PROFILES[name]


def _rates(given: dict[str, Any]) -> tuple[Profile, Rates]:
    """The rates of a file, and the profile that they are for."""
    rates = read(Path(given["rates"]))
    profile = _profile({"profile": rates.profile, **given})
    if profile.name != rates.profile:
        where = f"the profile of {given['rates']}"
        raise ValueError(f"profile={profile.name!r}: allowed is {rates.profile!r}, {where}")
    return profile, rates


def _fit(given: dict[str, Any]) -> int:
    profile, source = _profile(given), Path(given["fit"])
    if source.suffix == ".json":
        rates = learn.from_cases(files.read_cases("fit", source), profile, source.name)
    else:
        rates = learn.from_rows(files.read_rows("fit", source), profile, source.name)
    options.written("rates", given["rates"], rates.write)
    print(table(rates))
    return 0


def table(rates: Rates) -> str:
    """Rates as text: value, how far off it may be, what it is, where it comes from."""
    lines = [f"{'rate':<12} {'value':>9}  {'±':>5}  what, and its origin"]
    for name, rate in rates.all.items():
        spread = f"{100 * rate.spread:.0f} %"
        lines.append(f"{name:<12} {rate.value:>9.4g}  {spread:>5}  {rate.unit}; {rate.origin}")
    return "\n".join(lines)


def predicted_rows(path: Path, profile: Profile, rates: Rates) -> str:
    """The CSV file with what is predicted of each row, in order. Raises ValueError for the file."""
    rows = files.read_rows("predict", path)
    values = check_rates(profile, rates)
    columns = [name for name in (rows[0] if rows else files.COLUMNS) if name not in (None, *ADDED)]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *ADDED], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        found: dict[str, Any] = dict.fromkeys(ADDED, "")
        try:
            job = files.row_job(row, profile)
            size = min(first_rank(job, values), _all_there_is(job.machine.memory))
            found["predicted_seconds"] = f"{of_job(job, values).seconds.total:.6g}"
            found["predicted_memory_gib"] = f"{size / GIB:.4g}"
        except ValueError as error:
            found = dict.fromkeys(ADDED, "") | {"note": str(error)}
        writer.writerow({**row, **found})
    return text.getvalue()


def _all_there_is(memory: float) -> float:
    """Bytes that an allocator can reserve: tools report 6 % more than the product's name says.

    A job that needs a little more gives back what it lost to fragments, and goes on.
    """
    return 1.06 * memory


def predicted_cases(path: Path, profile: Profile, rates: Rates) -> list[dict[str, Any]]:
    """What is predicted of each case, in order. Raises ValueError for the file."""
    values = check_rates(profile, rates)
    listed = []
    for case in files.read_cases("case", path):
        found: dict[str, Any] = {"id": case["id"], "seconds": None, "memory_gib": None, "note": ""}
        try:
            prediction = of_job(files.case_job(case["config"], profile), values)
            found["seconds"] = float(f"{prediction.seconds.total:.6g}")
            found["memory_gib"] = float(f"{prediction.memory.allocated / GIB:.4g}")
        except ValueError as error:
            found["note"] = str(error)
        listed.append(found)
    return listed
