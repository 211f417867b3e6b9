"""The quizzes of the parts, book/quizzes.yml: read for the site's pages, and for notebooks.

copies-before:
  title: Before this part
  questions:
    - ask: What …?
      choices:
        - says: one thing
          why: what is wrong with it, with [the section](../lessons/zero.md#seconds)
        - says: another
          right: true
          why: …
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

QUIZZES = Path("book/quizzes.yml")


@dataclass(frozen=True)
class Choice:
    """What one may answer; why it is right or wrong, in Markdown."""

    says: str
    why: str
    right: bool = False


@dataclass(frozen=True)
class Question:
    """A question in Markdown, and its choices, one of them right."""

    ask: str
    choices: list[Choice]


@dataclass(frozen=True)
class Quiz:
    """Questions before a part, or after it."""

    title: str
    questions: list[Question]


def read(root: Path) -> dict[str, Quiz]:
    """The quizzes by their names. Raises ValueError for a question without one right choice."""
    return _read(root / QUIZZES, (root / QUIZZES).stat().st_mtime_ns)


@lru_cache
def _read(path: Path, _changed_at: int) -> dict[str, Quiz]:
    import yaml

    quizzes = {}
    for name, quiz in yaml.safe_load(path.read_text("utf-8")).items():
        quizzes[name] = Quiz(
            quiz["title"],
            [
                Question(one["ask"], [Choice(**choice) for choice in one["choices"]])
                for one in quiz["questions"]
            ],
        )
        for one in quizzes[name].questions:
            if sum(choice.right for choice in one.choices) != 1:
                raise ValueError(f"{QUIZZES}: {name}: {one.ask!r}: allowed is one right choice")
    return quizzes


def plain(quiz: Quiz) -> str:
    """The quiz as Markdown: each choice folded over what it is worth."""
    lines = [f"**{quiz.title}**", ""]
    for number, question in enumerate(quiz.questions, 1):
        lines += [f"{number}. {question.ask.strip()}", ""]
        for choice in question.choices:
            verdict = "**Right.**" if choice.right else "**No.**"
            lines += [f"<details><summary>{choice.says}</summary>", ""]
            lines += [f"{verdict} {choice.why.strip()}", "", "</details>", ""]
    return "\n".join(lines).rstrip("\n")
