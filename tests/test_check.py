"""Exercises that check themselves: the engine, and every exercise of every lesson.

The answers are read from the lessons, so that what is tested is what the page shows: the unanswered
form stands between `exercise-start` and `exercise-end`, the solution after `solution-start`.
"""

from __future__ import annotations

import gc
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from answers import ROWS, Swap

from shardcourse import exercises as check_module
from shardcourse.exercises import Verdict, Wrong, check
from shardcourse.exercises.forms import Number, run_answer, same
from shardlab.common.show import ROOT

LESSONS = sorted((ROOT / "lessons").glob("*.md"))
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GATED = re.compile(
    r"^```\{(exercise|solution)-start\}(.*?)^```\{\1-end\}", re.MULTILINE | re.DOTALL
)


def cells(text: str) -> list[str]:
    """The sources of the code cells in a piece of a lesson."""
    return [
        re.sub(r"\A(:.*\n)+|\A---\n.*?---\n", "", cell, flags=re.DOTALL)
        if cell.startswith("---")
        else re.sub(r"\A(:.*\n)+\n?", "", cell)
        for cell in CELL.findall(text)
    ]


def exercises(lesson: Path) -> list[tuple[str, str, str]]:
    """(label, unanswered form, solution) of every exercise of a lesson."""
    text = lesson.read_text("utf-8")
    asked, solved = {}, {}
    for kind, body in GATED.findall(text):
        if kind == "exercise":
            label = re.search(r"^:label: *(\S+)", body, re.MULTILINE)[1]
            asked[label] = "\n".join(cells(body))
        else:
            solved[body.split("\n")[0].strip(" }")] = "\n".join(cells(body))
    assert asked.keys() == solved.keys(), f"{lesson.name}: exercises without a solution, or reverse"
    return [(label, asked[label], solved[label]) for label in asked]


ALL = [(lesson.stem, *row) for lesson in LESSONS for row in exercises(lesson)]


@cache
def imported(topic: str) -> dict[str, object]:
    """What a lesson's first cell leaves."""
    space: dict[str, object] = {"__name__": "__main__"}
    first = cells((ROOT / "lessons" / f"{topic}.md").read_text("utf-8"))[0]
    exec(compile(first, f"{topic}.md", "exec"), space)
    return space


def answer(topic: str, code: str) -> list[Verdict]:
    """Run an exercise's cells after the lesson's imports; return the verdicts they gave."""
    verdicts: list[Verdict] = []
    space = dict(imported(topic))
    original = space["check"]
    space["check"] = lambda *args, **kwargs: verdicts.append(original(*args, **kwargs))
    exec(compile(code, f"{topic}.md", "exec"), space)
    return verdicts


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_three_exercises_or_more(lesson: Path):
    assert len(exercises(lesson)) >= 3


@pytest.mark.parametrize(("topic", "label", "asked", "solved"), ALL, ids=[row[1] for row in ALL])
def test_the_unanswered_form_fails_and_helps(topic: str, label: str, asked: str, solved: str):
    verdicts = answer(topic, asked)
    assert verdicts and not any(v.ok for v in verdicts)


@pytest.mark.parametrize(("topic", "label", "asked", "solved"), ALL, ids=[row[1] for row in ALL])
def test_the_solution_passes(topic: str, label: str, asked: str, solved: str):
    verdicts = answer(topic, solved)
    assert verdicts and all(v.ok for v in verdicts), verdicts


SOLVED = {re.search(r'(\w+)"?\)\s*$', solved)[1]: (topic, solved) for topic, _, _, solved in ALL}
ANSWERS = [
    pytest.param(name, given, words, id=f"{name}-{i}")
    for name, rows in ROWS.items()
    for i, (given, words) in enumerate(rows)
]


def judged(name: str, given: object) -> Verdict:
    """The verdict on an answer, or on the lesson's solution with pieces of it replaced."""
    if not isinstance(given, Swap):
        return check(given, name)
    topic, code = SOLVED[name]
    for old, new in given.pairs:
        assert old in code, f"the solution of {name} no longer has {old!r}"
        code = code.replace(old, new)
    (verdict,) = answer(topic, code)
    return verdict


@pytest.mark.parametrize(("name", "given", "words"), ANSWERS)
def test_an_answer_is_told_what_is_wrong_with_it(name: str, given: object, words: str):
    verdict = judged(name, given)
    assert not verdict.ok and words in verdict.message, verdict


def test_every_exercise_has_wrong_answers():
    assert set(ROWS) == set(check_module.names())


def test_who_teaches_is_told_the_mistakes_that_a_check_knows():
    told = check_module.mistakes("zero_bytes")
    assert "2.08e+11: That is stage 0: every rank holds everything." in told
    assert any("Rounded down" in words for words in check_module.mistakes("my_shard_bounds"))
    with pytest.raises(ValueError, match="exercise='gone': allowed are .*zero_bytes"):
        check_module.mistakes("gone")


def test_kills_count_the_lines_of_the_answer_alone():
    """A collection has callbacks (Hypothesis's, IPython's) that run in the middle of the answer.

    Each process that is killed counts lines for itself. Were a callback's among them in one and
    not in the next, the one line at which this answer loses the file could be passed over.
    """
    loses = Swap("    os.replace", "    path.unlink(missing_ok=True)\n    os.replace")
    quiet = judged("my_write", loses).message
    threshold = gc.get_threshold()
    gc.callbacks.append(callback := lambda phase, info: None)
    gc.set_threshold(1)
    try:
        assert judged("my_write", loses).message == quiet
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)


def test_same_recognises_a_known_mistake():
    want = [torch.ones(2)] * 2
    hints = {"That is the sum, not the mean.": [torch.full((2,), 2.0)] * 2}
    with pytest.raises(Wrong, match=r"off by up to 1\. That is the sum, not the mean\."):
        same([torch.full((2,), 2.0)] * 2, want, hints=hints)


def test_number_says_which_way_and_why():
    Number(12).judge(12)
    Number(12, rel=0.01).judge(12.05)
    with pytest.raises(Wrong, match="13 bytes is too large"):
        Number(12, "bytes").judge(13)
    with pytest.raises(Wrong, match=r"a factor of 10\^9: the unit is bytes"):
        Number(12e9, "bytes").judge(12)
    with pytest.raises(Wrong, match="That counts both directions"):
        Number(12, wrong={24: "That counts both directions."}).judge(24)
    with pytest.raises(Wrong, match="should be a number of bytes, not 'twelve'"):
        Number(12, "bytes").judge("twelve")
    with pytest.raises(Wrong, match="0 is too small"):
        Number(12).judge(0)


def test_a_failing_answer_is_wrong_not_an_error():
    def fails() -> None:
        raise ValueError("boom")

    with pytest.raises(Wrong, match="With 2 ranks, rank 0 of 2 raised ValueError: boom"):
        run_answer(fails, 2)


def test_an_unknown_exercise():
    with pytest.raises(ValueError, match="exercise='nonsense': allowed are "):
        check(1, "nonsense")


def test_a_verdict_escapes_what_the_reader_wrote():
    page = Verdict(False, "<b> & more")._repr_html_()
    assert "&lt;b&gt; &amp; more" in page and "verdict-wrong" in page
