"""Published silent bugs are found, where they are and by their name; without them all is silent."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import parity_published_copies
import parity_published_cuts
import parity_published_held_out
import parity_published_held_out_copies
import parity_published_installed
import pytest
from parity_programs import compared
from parity_published import THREADS

from shardlab import deepspeed_engine

TABLES = (
    parity_published_cuts, parity_published_copies, parity_published_held_out,
    parity_published_held_out_copies, parity_published_installed,
)  # fmt: skip

# Of all, those whose words no other test of parity has, on as few ranks as they need.
DAILY = (
    "xtuner 1004", "ms-swift 7944", "Megatron-LM 1256", "Automodel 3530", "Megatron-LM 4641",
    "Megatron-LM 3672", "Megatron-LM 7513", "build-nanogpt 30", "open-instruct 1498",
    "open-instruct 1498, stage 1", "pytorch 190626", "DeepSpeed 1800", "KempnerForge 115",
    "accelerate 4071",
)  # fmt: skip


@cache
def reports(whole: bool) -> dict[tuple[str, bool], Any]:
    """By thread, and whether it is the wrong program."""
    deepspeed_engine.prepare()  # imported once, and not on each rank
    cases = {
        (name, wrong): (thread.plain, thread.wrong if wrong else thread.right, thread.ranks)
        for name, thread in THREADS.items()
        if whole or name in DAILY
        for wrong in (True, False)
    }
    return compared(cases)


def told(report: Any) -> tuple[str, str]:
    """The place of the first wrong tensor, and all that is said."""
    key = report.first.key
    return f"{key.step} {key.phase} {key.name}", str(report).replace("\n", " ")


@pytest.mark.timeout(900)  # whoever comes first waits for all
@pytest.mark.parametrize("name", THREADS)
def test_a_published_bug_is_found_and_without_it_all_is_silent(name, request):
    whole = request.config.getoption("--whole")
    if name not in DAILY and not whole:
        pytest.skip("--whole tries all of them")
    thread, report = THREADS[name], reports(whole)[name, True]
    without = reports(whole)[name, False]
    assert without.equal, without
    if thread.live:
        assert not report.equal, (
            f"{name}: {thread.live} has this bug, and what is installed has not. Build it anew in "
            "the row, without the library's help, and take the row's `live` and what pages say away"
        )
    assert not report.equal
    place, words = told(report)
    assert re.search(thread.shows or thread.place, place), report
    assert re.search(thread.says or thread.words, words), report
