"""A lesson's exercises as a notebook: without their solutions, with their checks.

    >>> book = exercises("zero", root)

It starts with what the lesson's first cell imports: exercises and solutions use nothing else of the
lesson (a test says so), and so each can be begun without the others.
"""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat

from shardlab import __version__

from .key import notebook
from .reading import Writer, numbered, parts

_INTRO = """\
# Exercises: {title}

The exercises of a lesson of the course *One Model, Many GPUs*, without their solutions.
Write your answer, run the cell, and its check says what is right and what is not yet.
The solutions stand in the lesson.

You need the course's package `shardlab`, version {version}, and what it needs, but no GPU.
In the course's folder `make lab` opens JupyterLab with all of it: put this file in there."""
_SETUP = "What the lesson imports. Run this cell first."


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
    writer = Writer(topic, root)
    writer.labels.clear()  # the places that they name are not in here
    title = next(part.text for part in lesson if part.text.startswith("# ")).splitlines()[0][2:]
    first = next((part.text for part in lesson if part.kind == "code"), "")
    new = nbformat.v4
    cells = [
        new.new_markdown_cell(_INTRO.format(title=writer.plain(title), version=__version__)),
        new.new_markdown_cell(_SETUP),
        new.new_code_cell(imports(first)),
    ]
    number = 0
    for place, kind, text, _ in lesson:
        if place not in ("exercise", "between"):
            continue
        if kind == "code":
            if place == "exercise":
                cells.append(new.new_code_cell(text))
        elif kind == "markdown":
            if not cells[-1].source.startswith(f"## {number}. "):  # a title and its text are one
                cells.append(new.new_markdown_cell(""))
            cells[-1].source = f"{cells[-1].source}\n\n{writer.plain(text)}".strip()
        elif place == "exercise":
            number += 1
            cells.append(new.new_markdown_cell(f"## {number}. {writer.plain(text)}"))
    return numbered(cells)
