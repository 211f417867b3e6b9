"""Notebook of a lesson's exercises, with their checks and without their solutions.

    >>> book = exercises("zero", root)

The notebook starts with the imports of the lesson's first cell: exercises and solutions use nothing
else of the lesson (a test checks it), so that a reader can start with any exercise.
"""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat

from shardlab import __version__

from .key import load_notebook
from .notebook_export import MarkdownWriter, convert_cells, make_notebook

_INTRO = """\
# Exercises: {title}

The exercises of a lesson of the course *One Model, Many GPUs*, without their solutions.
Write your answer, run the cell, and its check says what is right and what is not yet.
The solutions stand in the lesson.

You need the course's package `shardlab`, version {version}, and what it needs, but no GPU.
In the course's folder `make lab` opens JupyterLab with all of it: put this file in there."""
_SETUP = "What the lesson imports. Run this cell first."


def extract_imports(source: str) -> str:
    """Return the import statements of a cell, verbatim."""
    lines = source.splitlines()
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    return "\n".join("\n".join(lines[n.lineno - 1 : n.end_lineno]) for n in nodes)


def make_exercise_notebook(topic: str, root: Path) -> nbformat.NotebookNode | None:
    """Return the exercises of the lesson `topic` as a notebook; None when it has none.

    Cells: an introduction with requirements; the imports of the lesson's first cell; then each
    exercise's title and text, and its cell as the reader gets it. Text between the exercises is
    kept in its place.
    """
    writer = MarkdownWriter(topic, root)
    writer.labels.clear()  # the labels' targets are not in this notebook
    lesson = convert_cells(load_notebook(topic, root), writer)
    asked = [cell for place, cell in lesson if place in ("exercise", "between")]
    asked = [cell for cell in asked if cell.source != "## Exercises"]  # nothing follows it
    if not asked:
        return None
    title = lesson[0][1].source.splitlines()[0].removeprefix("# ")
    first = next((cell.source for _, cell in lesson if cell.cell_type == "code"), "")
    new = nbformat.v4
    return make_notebook([
        new.new_markdown_cell(_INTRO.format(title=title, version=__version__)),
        new.new_markdown_cell(_SETUP),
        new.new_code_cell(extract_imports(first)),
        *asked,
    ])  # fmt: skip
