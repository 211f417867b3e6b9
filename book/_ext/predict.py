"""Predict, then open: a question before a table, whose answer the reader writes first.

    ```{predict}
    :row: 1
    :column: on 64 ranks (GB)

    How many GB does a rank of 64 hold in stage 1?
    ```

It stands right before the cell that makes the table. `row` is the text of the row's first cell,
`column` a head: the number is the table's own, so it changes with it. Without a script and on paper
question, code and table stand one below the other; static/predict.js hides what follows until a
number is there, and keeps it in the reader's browser.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from markup import CELL, ROW, plain
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from steps import ELSEWHERE

_TABLE = re.compile(r'<table class="table[^"]*">.*?</table>', re.DOTALL)


class Predict(nodes.General, nodes.Element):
    """The question; after the cell is known, `value`, and the cell as its last child."""


class Answer(nodes.General, nodes.Element):
    """Holds the cell."""


class PredictDirective(SphinxDirective):
    """A question, and where its answer stands in the next cell's table."""

    has_content = True
    option_spec = {"row": directives.unchanged_required, "column": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Parse the question; the number is found when the page is read."""
        for name in self.option_spec:
            if name not in self.options:
                raise self.error(f"predict: allowed is one with :{name}:")
        box = Predict(row=self.options["row"], column=self.options["column"])
        self.state.nested_parse(self.content, self.content_offset, box)
        self.set_source_info(box)
        if not any(child.astext().rstrip().endswith("?") for child in box.children):
            raise self.error("predict: allowed is a question, which ends in ?")
        return [box]


def cells(table: str) -> list[list[str]]:
    """The texts of a table of `show.table`, its head first."""
    return [[plain(text) for *_, text in CELL.findall(row)] for row in ROW.findall(table)]


def number(page: str, row: str, column: str) -> float:
    """The number in that row and column of the page's tables. Raises ValueError where none is."""
    for head, *rows in map(cells, _TABLE.findall(page)):
        if head.count(column) == 1:
            for found in rows:
                if found[0] == row:
                    text = found[head.index(column)].replace(",", "").rstrip(" %x×")
                    return float(text)
    raise ValueError(f"no table with one column {column!r} and a row {row!r}")


def join(app: Sphinx, doctree: nodes.document) -> None:
    """Give each question its number, and take the cell after it in."""
    for count, box in enumerate(list(doctree.findall(Predict)), 1):
        place = box.parent.index(box) + 1
        cell = box.parent[place] if place < len(box.parent) else None
        if not isinstance(cell, nodes.Element) or "cell" not in cell.get("classes", []):
            raise ExtensionError(f"{app.env.docname}: predict stands before no cell")
        page = "".join(raw.astext() for raw in cell.findall(nodes.raw))
        try:
            box["value"] = number(page, box["row"], box["column"])
        except ValueError as error:
            where = f"{app.env.docname}, line {box.line}: predict"
            raise ExtensionError(f"{where}: {error}") from None
        box.parent.remove(cell)
        box += Answer("", cell)
        box["number"] = count


def open_question(translator: Any, node: Predict) -> None:
    """Begin the box."""
    number, value = node["number"], format(node["value"], "g")
    translator.body.append(
        f'<div class="predict" id="predict-{number}" role="group" aria-label="Predict first"'
        f' data-value="{value}">\n<p class="predict-title">Predict first</p>\n'
    )


def open_answer(translator: Any, node: Answer) -> None:
    """Begin what waits for a number."""
    translator.body.append('<div class="predict-answer">\n')


def close(translator: Any, node: nodes.Element) -> None:
    """End either."""
    translator.body.append("</div>\n")


def load(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let a page with a question load its script, and one with a quiz or a question their style."""
    body = context.get("body", "")
    for name in ("predict", "quiz"):
        if f'class="{name}"' in body:
            app.add_js_file(f"{name}.js", loading_method="defer")
            app.add_css_file("asking.css")


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.add_node(Predict, html=(open_question, close), **ELSEWHERE)
    app.add_node(Answer, html=(open_answer, close), **ELSEWHERE)
    app.add_directive("predict", PredictDirective)
    app.connect("doctree-read", join)
    app.connect("html-page-context", load)
