"""Exercises that check themselves, on real ranks, in the page.

    check(my_broadcast)         # a function: its name is the exercise's name
    check(48, "ring_bytes")     # any other answer, with the exercise's name

A topic's exercises stand in the module of this package that has the topic's name, most of them as
data in one of the forms of `forms`: a number, a table of cases, on ranks. A verdict says what is
right or wrong in a sentence or two that help, and never shows the solution.
"""

from __future__ import annotations

import html
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shardlab.common import show

_EXERCISES: dict[str, Callable[[Any], str | None]] = {}
_MISTAKES: dict[str, list[str]] = {}


class Wrong(Exception):
    """Raised by an exercise whose answer is wrong; its text is what the reader sees."""


@dataclass(frozen=True)
class Verdict:
    """What `check` found: `ok`, and a sentence or two in `message`."""

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


def exercise(
    name: str, mistakes: Iterable[str] = ()
) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
    """Register a check under the exercise's `name`, which is unique in the whole course.

    mistakes: the well-known ones, in words, for who teaches.

    The decorated function takes the reader's answer. It returns None, or a sentence of praise that
    says what was compared, when the answer is right; it raises Wrong when it is not.
    """

    def register(judge: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        assert name not in _EXERCISES, f"two exercises are called {name}"
        _EXERCISES[name] = judge
        _MISTAKES[name] = list(mistakes)
        return judge

    return register


def names() -> list[str]:
    """The names of all exercises of the course."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_EXERCISES)


def mistakes(exercise: str) -> list[str]:
    """What is said of the well-known mistakes in an exercise. Raises ValueError for no exercise."""
    known = names()
    if exercise not in known:
        raise ValueError(f"exercise={exercise!r}: allowed are {', '.join(known)}")
    return _MISTAKES[exercise]


def check(answer: Any, exercise: str | None = None) -> Verdict:
    """Judge the reader's `answer`; `exercise` may be left out when it is a function of that name.

    Raises ValueError when there is no such exercise. A wrong answer raises nothing: the
    verdict says what is wrong.
    """
    name = exercise or getattr(answer, "__name__", None)
    known = names()
    if name not in known:
        raise ValueError(f"exercise={name!r}: allowed are {', '.join(known)}")
    try:
        if answer is None or answer is Ellipsis:
            raise Wrong("There is no answer yet: replace the dots and run the cell again.")
        verdict = Verdict(True, _EXERCISES[name](answer) or "Right.")
    except Wrong as wrong:
        verdict = Verdict(False, str(wrong))
    if not show.in_notebook():
        print(repr(verdict))
    return verdict
