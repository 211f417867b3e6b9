"""Exercises that check themselves: the engine, and every exercise of every lesson.

The answers are read from the lessons, so that the page's own text is tested: the unanswered form is
between `exercise-start` and `exercise-end`, the solution after `solution-start`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from answers import MORE_WRONG_ANSWERS, WRONG_ANSWERS, Swap

from shardcourse import exercises as check_module
from shardcourse.exercises import Verdict, WrongAnswer, check, forms
from shardlab.common.show import ROOT

LESSONS = sorted((ROOT / "lessons").glob("*.md"))
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GATED = re.compile(
    r"^```\{(exercise|solution)-start\}(.*?)^```\{\1-end\}", re.MULTILINE | re.DOTALL
)


def list_cells(text: str) -> list[str]:
    """Return the sources of the code cells in a part of a lesson."""
    return [
        re.sub(r"\A(:.*\n)+|\A---\n.*?---\n", "", cell, flags=re.DOTALL)
        if cell.startswith("---")
        else re.sub(r"\A(:.*\n)+\n?", "", cell)
        for cell in CELL.findall(text)
    ]


def read_exercises(lesson: Path) -> list[tuple[str, str, str]]:
    """Return (label, unanswered form, solution) of every exercise of a lesson."""
    text = lesson.read_text("utf-8")
    asked, solved = {}, {}
    for kind, body in GATED.findall(text):
        if kind == "exercise":
            label = re.search(r"^:label: *(\S+)", body, re.MULTILINE)[1]
            asked[label] = "\n".join(list_cells(body))
        else:
            solved[body.split("\n")[0].strip(" }")] = "\n".join(list_cells(body))
    assert asked.keys() == solved.keys(), f"{lesson.name}: exercises without a solution, or reverse"
    return [(label, asked[label], solved[label]) for label in asked]


ALL = [(lesson.stem, *row) for lesson in LESSONS for row in read_exercises(lesson)]


@cache
def run_imports(topic: str) -> dict[str, object]:
    """Return the namespace after a lesson's first cell."""
    space: dict[str, object] = {"__name__": "__main__"}
    first = list_cells((ROOT / "lessons" / f"{topic}.md").read_text("utf-8"))[0]
    exec(compile(first, f"{topic}.md", "exec"), space)
    return space


def run_cells(topic: str, code: str) -> list[Verdict]:
    """Run an exercise's cells after the lesson's imports; return the verdicts they gave."""
    verdicts: list[Verdict] = []
    space = dict(run_imports(topic))
    original = space["check"]
    space["check"] = lambda *args, **kwargs: verdicts.append(original(*args, **kwargs))
    exec(compile(code, f"{topic}.md", "exec"), space)
    return verdicts


@pytest.mark.parametrize(("topic", "label", "asked", "solved"), ALL, ids=[row[1] for row in ALL])
def test_the_unanswered_form_fails_and_the_solution_passes(
    topic, label, asked, solved, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(forms, "TIMEOUT_S", 3.0)  # one of the forms hangs, as its page says
        verdicts = run_cells(topic, asked)
    assert verdicts and not any(v.ok for v in verdicts)
    verdicts = run_cells(topic, solved)
    assert verdicts and all(v.ok for v in verdicts), verdicts


SOLUTIONS = {re.search(r'(\w+)"?\)\s*$', solved)[1]: (topic, solved) for topic, _, _, solved in ALL}


def judge_answer(name: str, given: object) -> Verdict:
    """Judge the answer, or the lesson's solution with parts replaced; return the verdict."""
    if not isinstance(given, Swap):
        return check(given, name)
    topic, code = SOLUTIONS[name]
    for old, new in given.pairs:
        assert old in code, f"the solution of {name} no longer has {old!r}"
        code = code.replace(old, new)
    (verdict,) = run_cells(topic, code)
    return verdict


ANSWERS = [(name, *row) for name, row in WRONG_ANSWERS.items()] + MORE_WRONG_ANSWERS


@pytest.mark.parametrize(("name", "given", "words"), ANSWERS, ids=[row[0] for row in ANSWERS])
def test_an_answer_is_told_what_is_wrong_with_it(name: str, given: object, words: str):
    verdict = judge_answer(name, given)
    assert not verdict.ok and words in verdict.message, verdict


def test_every_exercise_has_a_wrong_answer():
    assert set(WRONG_ANSWERS) == set(check_module.list_names())


def test_a_failing_answer_is_wrong_not_an_error():
    def raise_error() -> None:
        raise ValueError("boom")

    with pytest.raises(WrongAnswer, match="With 2 ranks, rank 0 of 2 raised ValueError: boom"):
        forms.run_answer(raise_error, 2)
