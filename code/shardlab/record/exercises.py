"""A lesson's exercises as a notebook: without their solutions, with their checks.

    >>> book = exercises("zero", root)

It starts with what the lesson's first cell imports: exercises and solutions use nothing else of the
lesson (a test says so), and so each can be begun without the others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat

from shardlab import __version__

from .kernel import KERNELSPEC
from .key import notebook

_MARK = re.compile(  # where an exercise or a solution begins or ends, and a section begins
    r"^```\{(exercise|solution)-(start|end)\}[ \t]*(.*)\n(?::.*\n)*```[ \t]*(?:\n|\Z)|^## +(.*)$",
    re.M,
)
_ROLE = re.compile(r"\{[\w:-]+\}`([^`]*?)(?: ?<[^`>]*>)?`")
_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)")

_INTRO = """\
# Exercises: {title}

The exercises of a lesson of the course *One Model, Many GPUs*, without their solutions.
Write your answer, run the cell, and its check says what is right and what is not yet.
The solutions stand in the lesson.

You need the course's package `shardlab`, version {version}, and what it needs, but no GPU.
In the course's folder `make lab` opens JupyterLab with all of it: put this file in there."""
_SETUP = "What the lesson imports. Run this cell first."


class Part(NamedTuple):
    """A cell, or a part of a text cell, of a lesson."""

    place: str  # "lesson", "between" the exercises, "exercise" or "solution"
    kind: str  # "markdown", "code", or "title" of an exercise
    text: str


def parts(book: nbformat.NotebookNode) -> Iterator[Part]:
    """The lesson in order, its text cells cut where exercises, solutions and sections begin."""
    place = outside = "lesson"
    for cell in book.cells:
        if cell.cell_type != "markdown":
            yield Part(place, "code", cell.source)
            continue
        # What stands before the first mark, then of each mark its four groups and what follows.
        pieces = iter(["", "", "", "", *_MARK.split(cell.source)])
        for what, edge, title, section, text in zip(*[pieces] * 5, strict=True):
            if section:
                place = outside = "between" if section.startswith("Exercises") else "lesson"
            elif what:
                place = what if edge == "start" else outside
                if place == "exercise":
                    yield Part(place, "title", title.strip())
            if text.strip():
                yield Part(place, "markdown", text.strip())


def imports(source: str) -> str:
    """The imports of a cell, as they stand."""
    lines = source.splitlines()
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    return "\n".join("\n".join(lines[n.lineno - 1 : n.end_lineno]) for n in nodes)


def exercises(topic: str, root: Path) -> nbformat.NotebookNode | None:
    """The exercises of the lesson `topic` as a notebook; None when it has none.

    Its cells: what it is and needs; what the lesson's first cell imports; then each exercise's
    title and text, and its cell with nothing filled in. What the section "Exercises" says between
    them stands there, too.
    """
    lesson = list(parts(notebook(topic, root)))
    if not any(part.place == "exercise" for part in lesson):
        return None
    title = _plain(next(p.text for p in lesson if p.text.startswith("# ")).splitlines()[0][2:])
    first = next((part.text for part in lesson if part.kind == "code"), "")
    new = nbformat.v4
    cells = [
        new.new_markdown_cell(_INTRO.format(title=title, version=__version__)),
        new.new_markdown_cell(_SETUP),
        new.new_code_cell(imports(first)),
    ]
    number = 0
    for place, kind, text in lesson:
        if kind == "title":
            number += 1
            cells.append(new.new_markdown_cell(f"## {number}. {_plain(text)}"))
        elif kind == "code" and place == "exercise":
            cells.append(new.new_code_cell(text))
        elif kind == "markdown" and place in ("exercise", "between"):
            if cells[-1].source.startswith(f"## {number}. "):  # its title and its text are one cell
                cells[-1].source += f"\n\n{_plain(text)}"
            else:
                cells.append(new.new_markdown_cell(_plain(text)))
    for place, cell in enumerate(cells):
        cell["id"] = f"cell-{place}"  # not random: the file should not change by itself
    return new.new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})


def _plain(text: str) -> str:
    """Markdown that stands by itself: without roles, and without links into the site."""
    return _LINK.sub(r"\1", _ROLE.sub(r"\1", text))
