"""Questions before and after a part, of what people get wrong: `{quiz} NAME`, of book/quizzes.yml

Each choice opens, and says why it is right or wrong. That needs no script, and prints whole;
static/quiz.js counts what was right at the first try, and keeps it in the reader's browser.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from steps import ELSEWHERE

from shardcourse.build.quizzes import QUIZZES, read


class Box(nodes.General, nodes.Element):
    """A quiz, a question of it, or a choice: `kind` says which."""


class QuizDirective(SphinxDirective):
    """A quiz by its name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The questions, with their choices."""
        root = Path(self.env.srcdir)
        self.env.note_dependency(str(root / QUIZZES))
        known, name = read(root), self.arguments[0]
        if name not in known:
            raise self.error(f"quiz: {name!r}; allowed are {', '.join(known)}")
        quiz = Box(kind="quiz", name=name, title=known[name].title)
        for number, question in enumerate(known[name].questions, 1):
            asked = Box(kind="question", number=number)
            self._parse(question.ask, asked)
            for choice in question.choices:
                # A summary is a button: what stands in it is text, without links.
                box = Box(kind="choice", right=choice.right, says=choice.says)
                self._parse(("**Right.** " if choice.right else "**No.** ") + choice.why, box)
                asked += box
            quiz += asked
        self.set_source_info(quiz)
        return [quiz]

    def _parse(self, text: str, box: nodes.Element) -> None:
        lines = text.strip().split("\n")
        self.state.nested_parse(StringList(lines, source=str(QUIZZES)), self.content_offset, box)


def opened(translator: Any, node: Box) -> None:
    """Begin a quiz, a question or a choice."""
    if node["kind"] == "quiz":
        title = escape(node["title"])
        text = f'<div class="quiz" role="group" aria-label="{title}" data-quiz="{node["name"]}">\n'
        text += f'<p class="quiz-title">{title}</p>\n'
    elif node["kind"] == "question":
        text = f'<div class="quiz-question" role="group" aria-label="Question {node["number"]}">\n'
    else:
        right = ' data-right="yes"' if node["right"] else ""
        text = f'<details class="quiz-choice"{right}><summary>{escape(node["says"])}</summary>\n'
    translator.body.append(text)


def closed(translator: Any, node: Box) -> None:
    """End it."""
    translator.body.append("</details>\n" if node["kind"] == "choice" else "</div>\n")


def setup(app: Sphinx) -> None:
    """Connect the extension; predict.py loads script and style."""
    app.add_node(Box, html=(opened, closed), **ELSEWHERE)
    app.add_directive("quiz", QuizDirective)
