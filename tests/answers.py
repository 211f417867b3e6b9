"""What the tests of all lessons' exercises share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shardlab.check import check, names


def each(answers: Sequence[tuple[str, Any, str | None]]) -> pytest.MarkDecorator:
    """A test for each (name of the exercise, answer, part of the verdict or None if right)."""
    ids = [f"{answer[0]}-{i}" for i, answer in enumerate(answers)]
    return pytest.mark.parametrize("name, answer, words", answers, ids=ids)


def judged(name: str, answer: Any, words: str | None) -> None:
    """The verdict on an answer is what it should be: right, or wrong in these words."""
    assert name in names()
    verdict = check(answer, name)
    assert verdict.ok == (words is None), verdict
    assert words is None or words in verdict.message
