"""Key of a page's outputs: hashes of its code cells and of every course file that they use.

    >>> reach("collectives", root)
    Key(cells='3f…', files={'code/shardlab/__init__.py': '9a…', …})

A recording stores the key of the page that it was made from. An equal key means that no code of
the page has changed since. Prose does not count; of the tags, only `raises-exception` does.

The files are those that the page's sources name (`DependencyFinder`), and those that its processes
opened when it was executed (`FileAuditLog`), which the recording lists.

A lesson's name is its topic, "collectives"; the name of a book page with cells is its path,
"book/questions_map".
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nbformat

_MODULE = re.compile(r"shardlab(\.\w+)+")
_FILE = re.compile(r"[^\n\0]{1,199}")  # a string that may be a file's path


@dataclass(frozen=True)
class Key:
    """Hashes of a page's code cells, in order, and of the files that they use."""

    cells: tuple[str, ...]
    files: dict[str, str]  # path below the root -> hash of the file's bytes

    @property
    def digest(self) -> str:
        """Hash of the whole key."""
        return _hash_bytes(json.dumps([self.cells, sorted(self.files.items())]).encode(), 64)

    def describe_changes(self, cells: list[str], files: dict[str, str]) -> list[str]:
        """Return how the recorded `cells` and `files` differ from this key, in clauses."""
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


def list_lessons(root: Path) -> list[str]:
    """Return the topics that have a lesson, sorted."""
    return sorted(path.stem for path in (root / "lessons").glob("*.md"))


def list_pages(root: Path) -> list[str]:
    """Return the names of all pages with cells to execute: lessons, and some pages of book/."""
    book = sorted((root / "book").glob("*.md"))
    return [*list_lessons(root), *(f"book/{path.stem}" for path in book if has_cells(path))]


def has_cells(path: Path) -> bool:
    """Return True if the page in the file `path` has a notebook's header."""
    header, end, _ = path.read_text("utf-8").partition("\n---\n")
    return header.startswith("---\n") and bool(end) and "format_name: myst" in header


def get_source_path(name: str, root: Path) -> Path:
    """Return the source file of the page `name`."""
    return root / (f"{name}.md" if "/" in name else f"lessons/{name}.md")


def load_notebook(name: str, root: Path) -> nbformat.NotebookNode:
    """Return the page as a notebook without outputs."""
    return parse_notebook(get_source_path(name, root).read_text("utf-8"))


def parse_notebook(text: str) -> nbformat.NotebookNode:
    """Parse a page into a notebook without outputs; its metadata hold the cells' line numbers."""
    return deepcopy(_parse_cached(text))  # a copy: the caller may add outputs


@lru_cache(maxsize=64)
def _parse_cached(text: str) -> nbformat.NotebookNode:
    from jupytext.myst import myst_to_notebook

    return myst_to_notebook(text, add_source_map=True)


def code_cells(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return the code cells of a notebook, in order."""
    return [cell for cell in book.cells if cell.cell_type == "code"]


def hash_cell(cell: nbformat.NotebookNode) -> str:
    """Return a cell's hash for the key: its source, and whether it is meant to raise."""
    raises = "raises-exception" in cell.metadata.get("tags", [])
    return _hash_bytes(json.dumps([cell.source.strip("\n"), raises]).encode())


class DependencyFinder:
    """Finder of the files that sources name; it reads each file once, while no file changes."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._references: dict[Path, tuple[list[Path], list[str]]] = {}
        self._modules: dict[tuple[Path, str], list[Path]] = {}
        self._paths: dict[tuple[Path, str], Path | None] = {}

    def list_file_dependencies(self, path: Path, home: Path) -> list[Path]:
        """Return the course files that the file `path` names, if it is run in `home`."""
        if path.suffix != ".py":
            return []
        if path not in self._references:
            source = path.read_text("utf-8", "replace")
            self._references[path] = self._parse_references(source, path.parent)
        return self._resolve_files(*self._references[path], home)

    def list_code_dependencies(self, source: str, home: Path) -> list[Path]:
        """Return the course files that the code `source` names, if it is run in `home`."""
        return self._resolve_files(*self._parse_references(source, home), home)

    def _resolve_files(self, modules: list[Path], strings: list[str], home: Path) -> list[Path]:
        found = [self._resolve_path(text, base) for text in strings for base in (self.root, home)]
        return modules + [path for path in found if path]

    def _resolve_path(self, text: str, base: Path) -> Path | None:
        """Return the course file at the path `text`, relative to the folder `base`, or None."""
        if (base, text) not in self._paths:
            there = os.path.isfile(os.path.join(base, text))  # rarely: and resolve() is slow
            path = (base / text).resolve() if there else None
            self._paths[base, text] = path if path and path.is_relative_to(self.root) else None
        return self._paths[base, text]

    def _parse_references(self, text: str, folder: Path) -> tuple[list[Path], list[str]]:
        """Return the module files that a source imports, and its strings that may be paths."""
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return [], []  # running the source will report the error
        modules: dict[Path, None] = {}
        strings: dict[str, None] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    modules.update(dict.fromkeys(self._list_module_files(alias.name, folder)))
            elif isinstance(node, ast.ImportFrom):
                for name in ["", *(alias.name for alias in node.names)]:
                    dotted = ".".join(filter(None, [node.module, name]))
                    if not node.level:
                        modules.update(dict.fromkeys(self._list_module_files(dotted, folder)))
                    elif (
                        above := self._split_folder([folder, *folder.parents][node.level - 1])
                    ) is not None:
                        package = [*above, *filter(None, dotted.split("."))]
                        modules.update(dict.fromkeys(self._iter_package_files(package)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if _MODULE.fullmatch(node.value):
                    modules.update(dict.fromkeys(self._list_module_files(node.value, folder)))
                if _FILE.fullmatch(node.value):
                    strings[node.value] = None
        return list(modules), list(strings)

    def _list_module_files(self, dotted: str, folder: Path) -> list[Path]:
        """Return the course files that importing `dotted` runs."""
        if (folder, dotted) not in self._modules:
            parts = dotted.split(".")
            own = self._split_folder(folder) or []  # a script's own folder is on sys.path
            places = dict.fromkeys([("code", *parts), (*parts,), (*own, *parts)])
            files = [path for place in places for path in self._iter_package_files(place)]
            self._modules[folder, dotted] = files
        return self._modules[folder, dotted]

    def _split_folder(self, folder: Path) -> list[str] | None:
        """Return the folder names from the root to `folder`; None if it is not below the root."""
        return [*folder.relative_to(self.root).parts] if folder.is_relative_to(self.root) else None

    def _iter_package_files(self, parts: Iterable[str]) -> Iterator[Path]:
        stem = str(self.root)
        for part in parts:
            stem = os.path.join(stem, part)
            for path in (os.path.join(stem, "__init__.py"), f"{stem}.py"):
                if os.path.isfile(path):
                    yield Path(path)


def compute_key(
    name: str,
    root: Path,
    book: nbformat.NotebookNode | None = None,
    finder: DependencyFinder | None = None,
    opened: Iterable[str] = (),
) -> Key:
    """Return the current key of the page `name` of the course in the folder `root`.

    book: the page as a notebook, if it was read before.
    finder: one that several calls share while no file changes.
    opened: paths below the root that the page's execution opened, from its recording.
    """
    finder = finder or DependencyFinder(root)
    cells = code_cells(book or load_notebook(name, finder.root))
    home = get_source_path(name, finder.root).parent  # the cells' working directory
    first = [path for cell in cells for path in finder.list_code_dependencies(cell.source, home)]
    seen = [path for path in map(finder.root.joinpath, opened) if path.is_file()]
    exercises = finder.root / "code/shardcourse/exercises" / f"{name}.py"
    files = _hash_dependencies(first, finder, home, exercises, seen)
    return Key(tuple(hash_cell(cell) for cell in cells), files)


def compute_program_key(path: Path, root: Path) -> Key:
    """Return the key (files only) of the Python program `path`, run in the folder `root`."""
    finder = DependencyFinder(root)
    return Key((), _hash_dependencies([finder.root / path], finder, finder.root))


def _hash_dependencies(
    first: list[Path],
    finder: DependencyFinder,
    home: Path,
    exercises: Path | None = None,
    seen: Iterable[Path] = (),
) -> dict[str, str]:
    """Return hashes of `seen` and of the files reached from `first`, including these.

    Files in `seen` were read, not run: the names in them are not followed.
    """
    found: dict[Path, None] = {}
    todo = list(first)
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = None
        todo += finder.list_file_dependencies(path, home)
        # No import names a lesson's exercises: check() finds them by the topic's name.
        if exercises and path.parent == exercises.parent and exercises.is_file():
            todo.append(exercises)
    found.update(dict.fromkeys(seen))
    hashes = {p: _hash_file(p, p.stat().st_mtime_ns) for p in found}
    return dict(sorted((p.relative_to(finder.root).as_posix(), h) for p, h in hashes.items()))


def are_unchanged(files: dict[str, str], root: Path) -> bool:
    """Return True if all `files` of a key exist below `root`, with their hashes there."""
    paths = [root / path for path in files]
    if not all(map(Path.is_file, paths)):
        return False
    return [_hash_file(p, p.stat().st_mtime_ns) for p in paths] == [*files.values()]


@lru_cache(maxsize=4096)
def _hash_file(path: Path, mtime: int) -> str:
    return _hash_bytes(path.read_bytes().replace(b"\r\n", b"\n"))


def _hash_bytes(data: bytes, digits: int = 16) -> str:
    return hashlib.sha256(data).hexdigest()[:digits]


# Each process appends the paths that are new to it, and opens the log each time: a rank may close
# all inherited descriptors, and the log's number could then belong to another file.
_HOOK = '''\
"""Notes the files below {root!r} that this process opens."""
import importlib.machinery
import importlib.util
import os
import sys

WRITES = os.O_WRONLY | os.O_RDWR
IMPORTS = "importlib._bootstrap_external"  # the standard library's importer, as its files call it
seen = set()


def note(event, arguments):
    if event != "open" or not isinstance(arguments[0], (str, bytes)):
        return
    try:
        path = os.path.abspath(os.fsdecode(arguments[0]))
        told = "w" if arguments[2] & WRITES else "r"
        if path.startswith({root!r}) and (told, path) not in seen:
            if IMPORTS in sys._getframe(1).f_code.co_filename:
                return
            seen.add((told, path))
            with open({log!r}, "ab") as log:
                log.write(os.fsencode(f"{{told}} {{path}}\\0"))
    except (OSError, ValueError):  # the page is done and the log gone; a folder gone from below
        pass


sys.addaudithook(note)
# The one that this one hides.
others = [path for path in sys.path if path != os.path.dirname(__file__)]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec and spec.loader:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
'''


class FileAuditLog:
    """Log of the course files that a page's processes open, in `folder`, first on PYTHONPATH.

    Only the log shows a path that is made up at run time, by a loop over a folder or by joining
    parts. Python tells an audit hook of every file that it opens (PEP 578). A process gets the hook
    from a `sitecustomize.py` on its PYTHONPATH, and forks inherit it, so that the kernel, its ranks
    and commands in cells are covered. Imported code counts only if a source names it: `check`
    imports the exercises of all topics, and with them the whole course.
    """

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder = root, folder
        self.path = folder / "opened"
        hook = _HOOK.format(root=f"{root}{os.sep}", log=str(self.path))
        (folder / "sitecustomize.py").write_text(hook, "utf-8")

    def list_read_files(self) -> list[str]:
        """Return the paths below the root of files that were read and never written, sorted.

        Omitted: hidden files (an environment, git's), built or installed files, and files that no
        longer exist.
        """
        found: dict[str, set[str]] = {"r": set(), "w": set()}
        data = self.path.read_bytes() if self.path.exists() else b""
        for line in filter(None, data.split(b"\0")):
            told, _, path = os.fsdecode(line).partition(" ")
            found[told].add(os.path.relpath(path, self.root))
        read = found["r"] - found["w"]
        files = (path for path in read if (self.root / path).is_file())
        return sorted(filter(_is_course_source, files))


def _is_course_source(path: str) -> bool:
    parts = Path(path).parts
    return not any(part.startswith((".", "_build")) or part.endswith(".egg-info") for part in parts)
