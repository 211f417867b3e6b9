"""Pytest plugin of the grader: options, cases, a fixture that starts ranks, and points."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardlab import ranks

from .core import CASE_TIMEOUT_S, Case, Check, run_case

MAX_TIMEOUTS = 2  # of a part, before the rest of the part is skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's two options."""
    parser.addoption("--engine", type=Path, default=Path(), help="the folder with the five files")
    parser.addoption("--seed", type=int, default=0, help="the seed of the hidden cases")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with every case of its part."""
    cases = metafunc.module.PART.draw_cases(metafunc.config.getoption("--seed"))
    metafunc.parametrize("case", cases, ids=str)


@pytest.fixture(scope="module")
def timed_out_cases() -> list[Case]:
    """Return the list of the part's cases that timed out."""
    return []


@pytest.fixture
def on_ranks(
    request: pytest.FixtureRequest,
    case: Case,
    timed_out_cases: list[Case],
    record_property: Callable[[str, object], None],
) -> Callable[[Check], None]:
    """Return a function that runs a check of the student's file on the ranks of the case."""
    part = request.module.PART.name
    file = request.config.getoption("--engine").resolve() / f"{part}.py"
    record_property("points", 1)
    record_property("hint", f"lessons/{part}.md")

    def run_check(check: Check) -> None:
        if not file.is_file():
            pytest.fail(f"there is no {file.name} in {file.parent}", pytrace=False)
        if len(timed_out_cases) == MAX_TIMEOUTS:
            pytest.fail(f"not run: {MAX_TIMEOUTS} cases before timed out", pytrace=False)
        begin = time.monotonic()
        try:
            run_case(check, file, case)
        except ranks.RankError as error:
            if time.monotonic() - begin > CASE_TIMEOUT_S:
                timed_out_cases.append(case)
            pytest.fail(str(error), pytrace=False)

    return run_check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the points of each part."""
    points, possible = Counter[str](), Counter[str]()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            properties = dict(report.user_properties)
            if report.when == "call" and "points" in properties:
                possible[properties["hint"]] += properties["points"]
                points[properties["hint"]] += properties["points"] * report.passed
    for hint in possible:
        more = "" if points[hint] == possible[hint] else f"; its lesson is {hint}"
        part = Path(hint).stem
        terminalreporter.write_line(f"{part}: {points[hint]} of {possible[hint]} points{more}")
