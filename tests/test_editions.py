"""Notebooks of exercises, to use without the course's folder."""

from __future__ import annotations

import builtins
import re
import symtable

import nbformat
import pytest

from shardcourse import build
from shardcourse.build.exercises import make_exercise_notebook
from shardcourse.build.notebook_export import split_parts
from shardlab.common import show

TOPICS = build.list_lessons(show.ROOT)


# --- Exercises as notebooks ---------------------------------------------------------------------


def list_names(source):
    """Return the global names that a cell binds, and those that it uses, also in its functions."""
    binds, uses = set(), set()
    todo = [symtable.symtable(source, "cell", "exec")]
    for table in todo:
        todo += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() == "module" and (symbol.is_assigned() or symbol.is_imported()):
                binds.add(symbol.get_name())
            if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
                uses.add(symbol.get_name())
    return binds, uses


@pytest.mark.parametrize("topic", TOPICS)
def test_exercises_hold_no_solution_and_all_that_they_and_a_solution_use(topic, root):
    """The notebook has all names that exercises and solutions use; test_check runs the cells."""
    book = make_exercise_notebook(topic, root)
    nbformat.validate(book)
    lesson = list(split_parts(build.load_notebook(topic, root)))
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    text = "\n".join(cell.source for cell in book.cells)
    assert code[1:] == [p.text for p in lesson if p.place == "exercise" and p.kind == "code"]
    given = {line.strip() for source in code for line in source.splitlines()}
    known = {name for source in code for name in list_names(source)[0]} | {*dir(builtins)}
    for part in lesson:
        if part.place == "solution":
            assert part.text not in text
        if part.place == "solution" and part.kind == "code":
            lines = {line.strip() for line in part.text.splitlines()}
            assert lines - given  # lines of each solution that no other cell has
        if part.place in ("exercise", "solution") and part.kind == "code":
            own, used = list_names(part.text)
            assert used <= own | known, f"not imported by the lesson's first cell, in {part.text}"
    words = [cell.source for cell in book.cells if cell.cell_type == "markdown"]
    assert words[0].startswith("# Exercises: ") and "make lab" in words[0]
    titles = [text.split(":")[0] for text in words if text.startswith("### ")]
    assert titles == [f"### Exercise {number}" for number in range(1, len(titles) + 1)]
    for text in words:  # their targets are not in the notebook
        assert "```{" not in text
        assert not re.search(r"\{[\w:]+\}`|\]\((?!https?:)", text)
    assert nbformat.writes(book) == nbformat.writes(make_exercise_notebook(topic, root))


def test_every_lesson_offers_its_exercises(site, root):
    for topic in TOPICS:
        lesson = (site / f"lessons/{topic}.html").read_text("utf-8")
        assert f'href="../downloads/{topic}_exercises.ipynb"' in lesson
        book = nbformat.read(site / f"downloads/{topic}_exercises.ipynb", as_version=4)
        assert book.cells == make_exercise_notebook(topic, root).cells
