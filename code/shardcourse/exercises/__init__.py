"""Exercises that check the reader's answers in the page, on real ranks where they need them.

    check(my_broadcast)         # a function: its name is the exercise's name
    check(48, "ring_bytes")     # any other answer, with the exercise's name

The exercises of a topic are in this package's module with the topic's name. Most are data for one
of the forms in `forms`: a number, a table of cases, a function on ranks. A verdict says in one or
two helpful sentences what is right or wrong, and never shows the solution.
"""

from __future__ import annotations

import html
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shardlab.common import show

_CHECKS: dict[str, Callable[[Any], str | None]] = {}
_MISTAKES: dict[str, list[str]] = {}


class WrongAnswer(Exception):
    """Raised by an exercise whose answer is wrong; its text is what the reader sees."""


@dataclass(frozen=True)
class Verdict:
    """Result of `check`: `ok`, and one or two sentences for the reader in `message`."""

    ok: bool
    message: str

    def __repr__(self) -> str:
        return f"{'✓' if self.ok else '✗'} {self.message}"

    def _repr_html_(self) -> str:
        kind = "right" if self.ok else "wrong"
        text = html.escape(repr(self)).replace("\n", "<br>")
        return f'<p class="verdict verdict-{kind}">{text}</p>'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}


def add_exercise(
    name: str, mistakes: Iterable[str] = ()
) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
    """Register a check under the exercise's `name`, which is unique in the whole course.

    mistakes: descriptions of the well-known mistakes, for teachers.

    The decorated function takes the reader's answer. It returns None, or a sentence of praise that
    says what was compared, when the answer is right; it raises WrongAnswer when it is wrong.
    """

    def add_check(check_answer: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        assert name not in _CHECKS, f"two exercises are called {name}"
        _CHECKS[name] = check_answer
        _MISTAKES[name] = list(mistakes)
        return check_answer

    return add_check


def list_names() -> list[str]:
    """Return the names of all exercises of the course."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_CHECKS)


def list_mistakes(exercise: str) -> list[str]:
    """Describe the well-known mistakes in an exercise. Raises ValueError for an unknown name."""
    known = list_names()
    if exercise not in known:
        raise ValueError(f"exercise={exercise!r}: must be one of {', '.join(known)}")
    return _MISTAKES[exercise]


def check(answer: Any, exercise: str | None = None) -> Verdict:
    """Judge the reader's `answer`; `exercise` may be left out for a function with that name.

    Raises ValueError when there is no such exercise. A wrong answer raises nothing: the
    verdict says what is wrong.
    """
    name = exercise or getattr(answer, "__name__", None)
    known = list_names()
    if name not in known:
        raise ValueError(f"exercise={name!r}: must be one of {', '.join(known)}")
    try:
        if answer is None or answer is Ellipsis:
            raise WrongAnswer("There is no answer yet: replace the dots and run the cell again.")
        verdict = Verdict(True, _CHECKS[name](answer) or "Right.")
    except WrongAnswer as wrong:
        verdict = Verdict(False, str(wrong))
    if not show.in_notebook():
        print(repr(verdict))
    return verdict
