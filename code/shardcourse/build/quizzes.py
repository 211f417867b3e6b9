"""Quizzes of the course's parts, book/quizzes.yml: read for the site's pages, and for notebooks.

copies:
  title: Four quick questions on this part
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

from functools import lru_cache
from pathlib import Path
from typing import Any

QUIZZES_FILE = Path("book/quizzes.yml")


def read_quizzes(root: Path) -> dict[str, Any]:
    """Return the quizzes by name, as in the file; texts are Markdown.

    Raises ValueError for a question without exactly one right choice.
    """
    return _read_cached(root / QUIZZES_FILE, (root / QUIZZES_FILE).stat().st_mtime_ns)


@lru_cache
def _read_cached(path: Path, _changed_at: int) -> dict[str, Any]:
    import yaml

    quizzes = yaml.safe_load(path.read_text("utf-8"))
    for name, quiz in quizzes.items():
        for one in quiz["questions"]:
            if sum(choice.get("right", False) for choice in one["choices"]) != 1:
                place = f"{QUIZZES_FILE}: {name}: {one['ask']!r}"
                raise ValueError(f"{place}: must have exactly one choice with right: true")
    return quizzes


def format_verdict(choice: dict[str, Any]) -> str:
    """Return whether a choice is right, and why, in Markdown."""
    return f"{'**Right.**' if choice.get('right') else '**No.**'} {choice['why'].strip()}"


def format_quiz(quiz: dict[str, Any]) -> str:
    """Return the quiz as Markdown: each choice unfolds its verdict."""
    lines = [f"**{quiz['title']}**", ""]
    for number, question in enumerate(quiz["questions"], 1):
        lines += [f"{number}. {question['ask'].strip()}", ""]
        for choice in question["choices"]:
            lines += [f"<details><summary>{choice['says']}</summary>", ""]
            lines += [format_verdict(choice), "", "</details>", ""]
    return "\n".join(lines).rstrip("\n")
