"""Parity finds published silent bugs, at the right place and by name, and no others."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from parity_mistakes import PROGRAMS
from parity_programs import compared
from parity_published import ELSEWHERE, LESSON, THREADS

# A selection: words that no other test of parity has, on as few ranks as possible.
DAILY = (
    "xtuner 1004", "Automodel 3530", "Megatron-LM 4641", "build-nanogpt 30", "pytorch 190626",
    "DeepSpeed 1800", "accelerate 4071",
)  # fmt: skip


@cache
def reports(whole: bool) -> dict[tuple[str, bool], Any]:
    """Return the reports by thread and by whether the program has the bug."""

    def program(name: str, wrong: bool) -> Any:
        return lambda watch: THREADS[name].program(watch, wrong)

    cases = {
        (name, wrong): (thread.plain, program(name, wrong), thread.ranks)
        for name, thread in THREADS.items()
        if whole or name in DAILY
        for wrong in (True, False)
    }
    return compared(cases)


@pytest.mark.timeout(900)  # the first test waits for all
@pytest.mark.parametrize("name", THREADS)
def test_a_published_bug_is_found_and_without_it_all_is_silent(name, request):
    whole = request.config.getoption("--whole")
    if name not in DAILY and not whole:
        pytest.skip("--whole tries all of them")
    thread, report = THREADS[name], reports(whole)[name, True]
    without = reports(whole)[name, False]
    assert without.equal, without
    assert not report.equal, f"{name}: does what is installed still have it? {thread.said}"
    key = report.first.key
    assert re.search(thread.place, f"{key.step} {key.phase} {key.name}"), report
    assert re.search(thread.words, str(report).replace("\n", " ")), report


def test_every_other_published_bug_is_a_program_that_is_tried():
    assert set(ELSEWHERE.values()) <= PROGRAMS.keys() | THREADS.keys() | {LESSON}
