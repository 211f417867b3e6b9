"""What a page's outputs depend on: its code cells, and every course file that they reach.

    >>> reach("collectives", root)
    Key(cells='3f…', files={'code/shardlab/__init__.py': '9a…', …})

A recording carries the key of the page that it was made from. Equal keys: nothing that a cell
runs has changed since. Prose does not count; neither do tags, but for `raises-exception`.

A lesson goes by its topic alone, "collectives"; a page of the book that has cells to execute goes
by its path, "book/questions_map".
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nbformat

_MODULE = re.compile(r"shardlab(\.\w+)+")
_SOURCES = ("code", "")  # where a module's file may stand, below the root


@dataclass(frozen=True)
class Key:
    """The code cells of a page (one hash each, in order) and the files that they reach."""

    cells: tuple[str, ...]
    files: dict[str, str]  # path below the root -> hash of its bytes

    @property
    def text(self) -> str:
        """The key as one hash."""
        return _hash(json.dumps([self.cells, sorted(self.files.items())]).encode(), 64)

    def changed(self, cells: list[str], files: dict[str, str]) -> list[str]:
        """What differs between the recorded `cells` and `files` and this key: a clause for each."""
        clauses = []
        if len(cells) != len(self.cells):
            clauses.append(f"{len(self.cells)} code cells instead of {len(cells)}")
        else:
            pairs = zip(cells, self.cells, strict=True)
            clauses += [f"code cell {n} changed" for n, (a, b) in enumerate(pairs, 1) if a != b]
        for path in sorted(files.keys() | self.files.keys()):
            if path not in self.files:
                clauses.append(f"{path} is used no more")
            elif path not in files:
                clauses.append(f"{path} is used now")
            elif files[path] != self.files[path]:
                clauses.append(f"{path} changed")
        return clauses


def lessons(root: Path) -> list[str]:
    """The topics that have a lesson, sorted."""
    return sorted(path.stem for path in (root / "lessons").glob("*.md"))


def pages(root: Path) -> list[str]:
    """The names of all pages with cells to execute: the lessons, and what book/ has of them."""
    book = sorted((root / "book").glob("*.md"))
    return [*lessons(root), *(f"book/{path.stem}" for path in book if has_cells(path))]


def has_cells(path: Path) -> bool:
    """Whether the page in the file `path` has a notebook's header."""
    header, end, _ = path.read_text("utf-8").partition("\n---\n")
    return header.startswith("---\n") and bool(end) and "format_name: myst" in header


def source(name: str, root: Path) -> Path:
    """The file that the page `name` is written in."""
    return root / (f"{name}.md" if "/" in name else f"lessons/{name}.md")


def notebook(name: str, root: Path) -> nbformat.NotebookNode:
    """The page as a notebook without outputs."""
    return read(source(name, root).read_text("utf-8"))


def read(text: str) -> nbformat.NotebookNode:
    """A page's text as a notebook without outputs; its metadata say where each cell stands."""
    from jupytext.myst import myst_to_notebook

    return myst_to_notebook(text, add_source_map=True)


def code_cells(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The code cells of a notebook, in order."""
    return [cell for cell in book.cells if cell.cell_type == "code"]


def cell_hash(cell: nbformat.NotebookNode) -> str:
    """A cell's part of the key: its source, and whether it is meant to raise."""
    raises = "raises-exception" in cell.metadata.get("tags", [])
    return _hash(json.dumps([cell.source.strip("\n"), raises]).encode())


def reach(
    name: str,
    root: Path,
    book: nbformat.NotebookNode | None = None,
    known: dict[tuple[Path, Path], list[Path]] | None = None,
) -> Key:
    """The key of the page `name` of the course in the folder `root`, as it stands now.

    book: the page when it was read already, by whichever reader.
    known: a dict that several calls share while no file changes: each file is then read once.
    """
    root = root.resolve()
    cells = code_cells(book or notebook(name, root))
    home = source(name, root).parent  # where the cells run: their paths start there
    first = [path for cell in cells for path in _reached(cell.source, home, root, home)]
    exercises = root / "code/shardlab/check" / f"{name}.py"
    files = _files(first, root, home, exercises, {} if known is None else known)
    return Key(tuple(cell_hash(cell) for cell in cells), files)


def reach_of_program(path: Path, root: Path) -> Key:
    """The key of the Python program in the file `path`, run in the folder `root`: files alone."""
    root = root.resolve()
    return Key((), _files([root / path], root, root, None, {}))


def _files(
    first: list[Path],
    root: Path,
    home: Path,
    exercises: Path | None,
    known: dict[tuple[Path, Path], list[Path]],
) -> dict[str, str]:
    """The files that those in `first` reach, with the hashes of their bytes."""
    found: dict[Path, None] = {}
    todo = list(first)
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = None
        if path.suffix == ".py":
            if (path, home) not in known:
                text = path.read_text("utf-8", "replace")
                known[path, home] = list(_reached(text, path.parent, root, home))
            todo += known[path, home]
        # check() finds a lesson's exercises by the topic's name: no import names them.
        if exercises and path.parent == exercises.parent and exercises.is_file():
            todo.append(exercises)
    files = {p.relative_to(root).as_posix(): _file_hash(p, p.stat().st_mtime_ns) for p in found}
    return dict(sorted(files.items()))


def _reached(text: str, folder: Path, root: Path, home: Path) -> Iterator[Path]:
    """The course files that the source `text`, which stands in `folder`, names itself."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # running it will tell
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module(alias.name, folder, root)
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if node.level:
                above = folder
                for _ in range(node.level - 1):
                    above = above.parent
                base = above.relative_to(root) if above.is_relative_to(root) else None
                if base is not None:
                    prefix = [*base.parts, *(node.module or "").split(".")]
                    for name in ["", *names]:
                        yield from _parts([part for part in [*prefix, name] if part], root)
            else:
                for name in ["", *names]:
                    dotted = f"{node.module}.{name}".rstrip(".")
                    yield from _module(dotted, folder, root)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _path(node.value, folder, root, home)


def _module(dotted: str, folder: Path, root: Path) -> Iterator[Path]:
    """The files that importing `dotted` runs, where they are the course's own."""
    parts = dotted.split(".")
    yield from _parts(["code", *parts], root)
    yield from _parts(parts, root)
    if folder != root and folder.is_relative_to(root):  # a script's own folder is on its path
        yield from _parts([*folder.relative_to(root).parts, *parts], root)


def _parts(parts: list[str], root: Path) -> Iterator[Path]:
    for end in range(1, len(parts) + 1):
        stem = root.joinpath(*parts[:end])
        for path in (stem / "__init__.py", stem.with_name(stem.name + ".py")):
            if path.is_file():
                yield path


def _path(text: str, folder: Path, root: Path, home: Path) -> Iterator[Path]:
    """The file below the root that a string names: as a path, or as a module of the package."""
    if not 0 < len(text) < 200 or "\n" in text or "\0" in text:
        return
    if _MODULE.fullmatch(text):
        yield from _module(text, folder, root)
    for base in (root, home):
        if not os.path.isfile(os.path.join(base, text)):  # most strings: and resolving is slow
            continue
        path = (base / text).resolve()
        if path.is_relative_to(root):
            yield path


@lru_cache(maxsize=4096)
def _file_hash(path: Path, mtime: int) -> str:
    return _hash(path.read_bytes().replace(b"\r\n", b"\n"))


def _hash(data: bytes, digits: int = 16) -> str:
    return hashlib.sha256(data).hexdigest()[:digits]
