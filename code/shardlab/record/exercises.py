"""A lesson's exercises as a notebook: without their solutions, with their checks.

    >>> book = exercises("zero", root)

The cells of exercises use what earlier cells of the lesson imported and defined. The notebook
starts with just that, cut out of those cells statement by statement: see `Slice`.
"""

from __future__ import annotations

import ast
import re
import symtable
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from .key import notebook

_WIDTH = 88  # columns of a line of code
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
_SETUP = "What the exercises use from the lesson. Run this cell first."


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


# --- What cells need from earlier ones --------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """A statement at a cell's top level, and the names that it binds and uses."""

    text: str  # with its comment lines
    node: ast.stmt
    binds: frozenset[str]
    uses: frozenset[str]  # while it runs
    later: frozenset[str]  # when a function that stands in it is called

    @property
    def imports(self) -> bool:
        """Whether it is an import."""
        return isinstance(self.node, ast.Import | ast.ImportFrom)


def statements(source: str) -> list[Statement]:
    """The statements of a cell. Raises SyntaxError for a cell that is not plain Python."""
    lines = source.splitlines()
    found, end = [], 0
    for node in ast.parse(source).body:
        begin = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while begin > end and lines[begin - 1].startswith("#"):
            begin -= 1
        end = node.end_lineno or begin
        text = "\n".join(lines[begin:end])
        found.append(Statement(text, node, *_names(text)))
    return found


def _names(source: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The global names that a statement binds, uses at once, and uses in functions."""
    table = symtable.symtable(source, "cell", "exec")
    binds, uses, later = set(), set(), set()
    for symbol in table.get_symbols():
        if symbol.is_assigned() or symbol.is_imported():
            binds.add(symbol.get_name())
        if symbol.is_referenced():
            uses.add(symbol.get_name())
    todo = list(table.get_children())
    while todo:
        inner = todo.pop()
        todo += inner.get_children()
        names = {s.get_name() for s in inner.get_symbols() if s.is_global() and s.is_referenced()}
        (uses if inner.get_type() == "class" else later).update(names)
    # `x += 1`, `x.y = 1` and `x[0] = 1` change what is there: they use x and bind it.
    for node in ast.walk(ast.parse(source)):
        targets = [node.target] if isinstance(node, ast.AugAssign) else []
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            targets = [node]
        for target in targets:
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            if isinstance(target, ast.Name) and target.id in binds | uses:
                binds.add(target.id)
                uses.add(target.id)
    return frozenset(binds), frozenset(uses), frozenset(later)


class Slice:
    """The statements, out of those that ran before, that some names stand on.

    A name stands on the last statement that binds it, on all imports when the last one is an
    import, and so do the names that this statement uses. What a function uses is looked up where
    the function is wanted, not where it was defined, as Python does it. What a call changes in
    place, `rows.append(1)`, is not followed.
    """

    def __init__(self, before: list[Statement]):
        self.before = before
        self.wanted: dict[int, set[str]] = {}  # index -> the names that are wanted from it
        self._seen: set[tuple[str, int]] = set()

    def want(self, name: str, limit: int) -> None:
        """Take what binds `name` among the first `limit` statements; nothing when none does."""
        if (name, limit) in self._seen:
            return
        self._seen.add((name, limit))
        binding = [n for n, s in enumerate(self.before[:limit]) if name in s.binds]
        last = binding[-1:]
        if last and self.before[last[0]].imports:
            last = [n for n in binding if self.before[n].imports]
        for index in last:
            statement = self.before[index]
            self.wanted.setdefault(index, set()).add(name)
            for used in statement.uses:
                self.want(used, index)
            for used in statement.later:
                self.want(used, limit)

    def source(self) -> str:
        """The wanted statements as one cell: imports first, narrowed to the wanted names."""
        imports, others = [], []
        for index, names in sorted(self.wanted.items()):
            statement = self.before[index]
            if statement.imports:
                imports += _narrowed(statement.node, names)
            else:
                others.append(statement)
        text = "\n".join(dict.fromkeys(imports))
        for number, statement in enumerate(others):
            wide = isinstance(statement.node, ast.FunctionDef | ast.ClassDef)
            wide = wide or isinstance(others[number - 1].node, ast.FunctionDef | ast.ClassDef)
            gap = "\n\n\n" if wide else "\n" if number else "\n\n"
            text += gap + statement.text
        return text.strip("\n")


def _narrowed(node: ast.stmt, names: set[str]) -> list[str]:
    """An import, of the wanted names alone, in lines of the usual width."""
    assert isinstance(node, ast.Import | ast.ImportFrom)
    aliases = [a for a in node.names if (a.asname or a.name.partition(".")[0]) in names]
    if isinstance(node, ast.Import):
        return [ast.unparse(ast.Import([alias])) for alias in aliases]
    line = ast.unparse(ast.ImportFrom(node.module, aliases, node.level))
    if len(line) > _WIDTH:
        head, _, tail = line.partition(" import ")
        line = f"{head} import (\n{textwrap.indent(tail.replace(', ', ',' + chr(10)), ' ' * 4)},\n)"
    return [line]


# --- The notebook -------------------------------------------------------------------------------


def exercises(topic: str, root: Path) -> nbformat.NotebookNode | None:
    """The exercises of the lesson `topic` as a notebook; None when it has none.

    Its cells: what it is and needs; what the lesson defined that exercises or their solutions use;
    then each exercise's title and text, and its cell with nothing filled in. What the section
    "Exercises" says between them stands there, too.
    """
    lesson = list(parts(notebook(topic, root)))
    if not any(part.place == "exercise" for part in lesson):
        return None
    title = _plain(next(p.text for p in lesson if p.text.startswith("# ")).splitlines()[0][2:])
    before: list[Statement] = []
    slice_ = Slice(before)
    body: list[nbformat.NotebookNode] = []
    number = 0
    for part in lesson:
        if part.kind == "code" and part.place != "lesson":
            here = statements(part.text)
            every = {name for statement in here for name in statement.binds}
            own: set[str] = set()
            for statement in here:
                for name in sorted((statement.uses - own) | (statement.later - every)):
                    slice_.want(name, len(before))
                own |= statement.binds
            if part.place == "exercise":
                body.append(nbformat.v4.new_code_cell(part.text))
        elif part.kind == "code":
            before += statements(part.text)
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
        nbformat.v4.new_code_cell(slice_.source()),
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
