"""Parity finds published silent bugs, at the right place and by name, and no others."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from parity_mistakes import PROGRAMS
from parity_programs import compare_cases
from parity_published import BUGS, ELSEWHERE, LESSON_FILE

# A selection: words that no other test of parity has, on as few ranks as possible.
DAILY = (
    "xtuner 1004", "Automodel 3530", "Megatron-LM 4641", "build-nanogpt 30", "pytorch 190626",
    "DeepSpeed 1800", "accelerate 4071",
)  # fmt: skip


@cache
def compute_reports(whole: bool) -> dict[tuple[str, bool], Any]:
    def bind_program(name: str, wrong: bool) -> Any:
        return lambda watch: BUGS[name].program(watch, wrong)

    cases = {
        (name, wrong): (thread.plain, bind_program(name, wrong), thread.ranks)
        for name, thread in BUGS.items()
        if whole or name in DAILY
        for wrong in (True, False)
    }
    return compare_cases(cases)


@pytest.mark.timeout(900)  # the first test waits for all
@pytest.mark.parametrize("name", BUGS)
def test_a_published_bug_is_found_and_without_it_all_is_silent(name, request):
    whole = request.config.getoption("--weekly")
    if name not in DAILY and not whole:
        pytest.skip("--weekly tries all of them")
    thread, report = BUGS[name], compute_reports(whole)[name, True]
    without = compute_reports(whole)[name, False]
    assert without.is_equal, without
    assert not report.is_equal, f"{name}: does what is installed still have it? {thread.quote}"
    key = report.first_finding.key
    assert re.search(thread.place, f"{key.step} {key.phase} {key.name}"), report
    assert re.search(thread.words, str(report).replace("\n", " ")), report


def test_every_other_published_bug_is_a_program_that_is_tried():
    assert set(ELSEWHERE.values()) <= PROGRAMS.keys() | BUGS.keys() | {LESSON_FILE}
