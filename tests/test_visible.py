"""Visible code of a lesson is mostly technique, and reading time is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import visible

from shardcourse.build import index

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted((ROOT / "lessons").glob("*.md"))
PAGES = index.read_index(ROOT).pages
PROOF = 0.08  # of the visible lines
CORE = 0.60  # of the core file's lines
# The command, the figures and the many checks are not what these topics teach.
# `cluster` teaches batch scripts, and commands that inspect a job.
WITHOUT_CORE = {"cluster", "model_parallelism"}


def for_each_lesson(test):
    return pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)(test)


@for_each_lesson
def test_few_visible_lines_assert_or_format(path):
    proof, total = visible.count_proof_lines(path.read_text("utf-8"))
    assert proof <= PROOF * total, f"{proof} of {total}: python tests/visible.py {path.name}"


@for_each_lesson
def test_a_lesson_takes_an_hour_without_what_can_wait_and_two_with_it(path):
    page = PAGES[path.stem]
    assert visible.count_words(page.text) <= 5000
    assert page.first_reading_minutes <= 60
    assert visible.estimate_minutes(page.text) <= 120


@for_each_lesson
def test_most_of_the_core_is_on_the_page(path):
    core = visible.find_core(path.stem)
    if path.stem in WITHOUT_CORE:
        assert core is None
        return
    there, lines = visible.count_core_lines(path.read_text("utf-8"), core)
    assert there >= CORE * lines
    assert len(core.read_text("utf-8").splitlines()) <= 400
