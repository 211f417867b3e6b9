"""Directives of lessons: pictures in steps, predictions, and quizzes.

Each directive writes plain HTML around its content as MyST parses it. Without JavaScript, on paper
and in notebooks, all parts are shown one below the other; a script in static/ hides and shows them.

Pictures in steps are an ordered list of pictures, each with a sentence (static/steps.js):

    :::{step-through} What the steps show
    1. ![What this picture shows](../figures/steps/topic_1.svg)

       What happens here, and why.

    2. ...
    :::

A prediction stands right before the cell that prints a table (static/predict.js). `row` is the text
of a row's first cell, `column` a column's head: the answer is read from the table itself.

    ```{predict}
    :row: 1
    :column: on 64 ranks (GB)

    How many GB does a rank of 64 hold in stage 1?
    ```

A quiz on a part asks about common mistakes: `{quiz} NAME`, from book/quizzes.yml. A choice that is
opened says why it is right or wrong (static/quiz.js).
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from bs4 import BeautifulSoup
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from shardcourse.build.notebook_export import classify_verdict
from shardcourse.build.quizzes import QUIZZES_FILE, format_verdict, read_quizzes

# Class of a box -> names of the script and the style that a page with such a box loads.
ASSETS = {"steps": ("steps", "steps"), "predict": ("predict", "asking"), "quiz": ("quiz", "asking")}


def make_html(text: str) -> nodes.raw:
    """Return a piece of HTML as a node."""
    return nodes.raw("", text, format="html")


class StepsDirective(SphinxDirective):
    """Directive with a title; its content is an ordered list whose items begin with a picture."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Parse the list; report anything else, with the page and the line."""
        box = nodes.Element()
        self.state.nested_parse(self.content, self.content_offset, box)
        if len(box.children) != 1 or not isinstance(box[0], nodes.enumerated_list):
            found = ", ".join(child.tagname for child in box.children) or "nothing"
            raise self.error(f"step-through: must contain one ordered list alone, not {found}")
        if len(box[0].children) < 2:
            raise self.error("step-through: must have at least two steps")
        for number, item in enumerate(box[0].children, 1):
            first = item[0] if item.children else None
            picture = first[0] if isinstance(first, nodes.paragraph) and first.children else None
            if not isinstance(picture, nodes.image) or not picture.get("alt", "").strip():
                raise self.error(f"step-through: step {number} must begin with ![description](…)")
            if not any(text.strip() for text in item.findall(nodes.Text)):  # without alt texts
                raise self.error(f"step-through: step {number} has a picture and no sentence")
        title = escape(self.arguments[0])
        head = f'<div class="steps" role="group" aria-label="{title}, in steps">\n'
        head += f'<p class="steps-title">{title}</p>\n'
        return [make_html(head), box[0], make_html("</div>\n")]


class QuizDirective(SphinxDirective):
    """Directive for a quiz, by name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the questions with their choices."""
        root = Path(self.env.srcdir)
        self.env.note_dependency(str(root / QUIZZES_FILE))
        known, name = read_quizzes(root), self.arguments[0]
        if name not in known:
            raise self.error(f"quiz={name!r}: must be one of {', '.join(known)}")
        title = escape(known[name]["title"])
        head = f'<div class="quiz" role="group" aria-label="{title}" data-quiz="{name}">\n'
        made: list[nodes.Node] = [make_html(f'{head}<p class="quiz-title">{title}</p>\n')]
        for number, question in enumerate(known[name]["questions"], 1):
            label = f'role="group" aria-label="Question {number}"'
            made.append(make_html(f'<div class="quiz-question" {label}>\n'))
            made += self._parse_markdown(question["ask"])
            for choice in question["choices"]:
                # A summary is a button: its content is text, without links.
                right = ' data-right="yes"' if choice.get("right") else ""
                says = f"<summary>{escape(choice['says'])}</summary>\n"
                made += [make_html(f'<details class="quiz-choice"{right}>{says}')]
                made += [*self._parse_markdown(format_verdict(choice)), make_html("</details>\n")]
            made.append(make_html("</div>\n"))
        return [*made, make_html("</div>\n")]

    def _parse_markdown(self, text: str) -> list[nodes.Node]:
        box = nodes.Element()
        lines = StringList(text.strip().split("\n"), source=str(QUIZZES_FILE))
        self.state.nested_parse(lines, self.content_offset, box)
        return box.children


class Predict(nodes.General, nodes.Element):
    """Placeholder of a question until the cell after it has been read: see `attach_answers`."""


class PredictDirective(SphinxDirective):
    """Directive for a question whose answer is in the next cell's table."""

    has_content = True
    option_spec = {"row": directives.unchanged_required, "column": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Parse the question; `attach_answers` finds the answer when the page has been read."""
        for name in self.option_spec:
            if name not in self.options:
                raise self.error(f"predict: must have the option :{name}:")
        box = Predict(row=self.options["row"], column=self.options["column"])
        self.state.nested_parse(self.content, self.content_offset, box)
        self.set_source_info(box)
        if not any(child.astext().rstrip().endswith("?") for child in box.children):
            raise self.error("predict: must contain a question, which ends in ?")
        return [box]


def find_table_value(page: str, row: str, column: str) -> float:
    """Return the number at a row and column of a page's tables. Raises ValueError if absent."""
    for table in BeautifulSoup(page, "html.parser").select("table.table"):
        rows = [[cell.get_text() for cell in one.select("th, td")] for one in table.select("tr")]
        if rows[0].count(column) == 1:
            for found in rows[1:]:
                if found[0] == row:
                    text = found[rows[0].index(column)].replace(",", "").rstrip(" %x×")
                    return float(text)
    raise ValueError(f"no table with one column {column!r} and a row {row!r}")


def attach_answers(app: Sphinx, doctree: nodes.document) -> None:
    """Look up the answer of each question, and move the cell after it into its box."""
    for count, box in enumerate(list(doctree.findall(Predict)), 1):
        place = box.parent.index(box) + 1
        cell = box.parent[place] if place < len(box.parent) else None
        if not isinstance(cell, nodes.Element) or "cell" not in cell.get("classes", []):
            raise ExtensionError(f"{app.env.docname}: predict must be followed by a cell")
        page = "".join(raw.astext() for raw in cell.findall(nodes.raw))
        try:
            value = find_table_value(page, box["row"], box["column"])
        except ValueError as error:
            where = f"{app.env.docname}, line {box.line}: predict"
            raise ExtensionError(f"{where}: {error}") from None
        head = make_html(
            f'<div class="predict" id="predict-{count}" role="group" aria-label="Predict first"'
            f' data-value="{value:g}">\n<p class="predict-title">Predict first</p>\n'
        )
        answer = make_html('<div class="predict-answer">\n')
        box.parent.remove(cell)
        box.replace_self([head, *box.children, answer, cell, make_html("</div>\n</div>\n")])


def mark_verdicts(app: Sphinx, doctree: nodes.document) -> None:
    """Give each box that judges a claim the class of the verdict in its title."""
    for box in doctree.findall(nodes.admonition):
        if "checked" in box["classes"]:
            try:
                box["classes"].append(classify_verdict(box[0].astext()))
            except ValueError as error:
                raise ExtensionError(f"{app.env.docname}: {error}") from None


def add_assets(app: Sphinx, body: BeautifulSoup) -> None:
    """Let a page with such boxes, and no other page, load their scripts and styles."""
    for kind, (script, style) in ASSETS.items():
        if body.find("div", class_=kind):
            app.add_js_file(f"{script}.js", loading_method="defer")
            app.add_css_file(f"{style}.css")
