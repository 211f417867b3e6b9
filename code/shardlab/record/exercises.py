"""A lesson's exercises as a notebook: without their solutions, with their checks.

    >>> book = exercises("zero", root)

It starts with what the lesson's first cell imports: exercises and solutions use nothing else of the
lesson (a test says so), and so each can be begun without the others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from .key import notebook

_FENCE = re.compile(
    r"^```\{(exercise|solution)-(start|end)\}[ \t]*(.*)\n(?::.*\n)*```[ \t]*(?:\n|\Z)", re.M
)
_SECTION = re.compile(r"^## +(.*)$", re.M)
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


@dataclass(frozen=True)
class Part:
    """A cell, or a part of a text cell, of a lesson."""

    place: str  # "lesson", "exercise" or "solution"
    kind: str  # "markdown", "code", or "title" of an exercise
    text: str
    section: str  # the title of the lesson's section that it stands in


def parts(book: nbformat.NotebookNode) -> Iterator[Part]:
    """The lesson in order, its text cells cut where exercises and solutions begin and end."""
    place, section = "lesson", ""
    for cell in book.cells:
        if cell.cell_type != "markdown":
            yield Part(place, "code", cell.source, section)
            continue
        end = 0
        for fence in _FENCE.finditer(cell.source):
            section = yield from _text(cell.source[end : fence.start()], place, section)
            place = fence[1] if fence[2] == "start" else "lesson"
            if place == "exercise":
                yield Part(place, "title", fence[3].strip(), section)
            end = fence.end()
        section = yield from _text(cell.source[end:], place, section)


def _text(text: str, place: str, section: str) -> Iterator[Part]:
    """The parts of `text`, one for each section of the lesson; return the last section."""
    titles = list(_SECTION.finditer(text)) if place == "lesson" else []
    bounds = [0, *(title.start() for title in titles), len(text)]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        title = _SECTION.match(text, begin)
        if title and place == "lesson":
            begin, section = title.end(), title[1]
        if text[begin:end].strip():
            yield Part(place, "markdown", text[begin:end].strip(), section)
    return section


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
    body: list[nbformat.NotebookNode] = []
    number = 0
    for part in lesson:
        if part.kind == "code":
            if part.place == "exercise":
                body.append(nbformat.v4.new_code_cell(part.text))
        elif part.kind == "title":
            number += 1
            body.append(nbformat.v4.new_markdown_cell(f"## {number}. {_plain(part.text)}"))
        elif part.place == "exercise" or (
            part.place == "lesson" and part.section.startswith("Exercises")
        ):
            body.append(nbformat.v4.new_markdown_cell(_plain(part.text)))
    from shardlab import __version__

    book = nbformat.v4.new_notebook()
    book.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    book.cells = [
        nbformat.v4.new_markdown_cell(_INTRO.format(title=title, version=__version__)),
        nbformat.v4.new_markdown_cell(_SETUP),
        nbformat.v4.new_code_cell(imports(first)),
        *_joined(body),
    ]
    for place, cell in enumerate(book.cells):
        cell["id"] = f"cell-{place}"  # not random: the file should not change by itself
    return book


def _joined(cells: list[nbformat.NotebookNode]) -> Iterator[nbformat.NotebookNode]:
    """The cells, an exercise's title and text as one."""
    last = None
    for cell in cells:
        heading = last is not None and last.source.startswith("## ")
        if heading and last.cell_type == cell.cell_type == "markdown":
            cell = nbformat.v4.new_markdown_cell(f"{last.source}\n\n{cell.source}")
        elif last is not None:
            yield last
        last = cell
    if last is not None:
        yield last


def _plain(text: str) -> str:
    """Markdown that stands by itself: without roles, and without links into the site."""
    return _LINK.sub(r"\1", _ROLE.sub(r"\1", text))
