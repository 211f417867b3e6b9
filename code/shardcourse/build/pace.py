"""How long a page takes to read: section by section, its words and the code that it shows.

    >>> sum(section.minutes for section in sections(text, root))

Nobody was timed. Minutes are counted: so many words and so many lines of code a minute as a
newcomer reads who wants to understand. What a page folds, its exercises and solutions are apart.
Sources that it shows are found without importing anything, so that this is quick.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

from .reading import Part, parts

# How fast one reads: prose with formulas and pictures, and code that one wants to understand.
WORDS_A_MINUTE, LINES_A_MINUTE = 150, 8
LEVELS = {"easy": 1, "medium": 2, "hard": 3, "design": 3}  # exercises' times beside one another
_CELL = re.compile(r"^```\{code-cell\}.*\n(?::tags: \[(.*)\]\n)?((?:.*\n)*?)```$", re.M)
Place = tuple[Path, int, int]  # a file, and its lines from which on and to which
Name = tuple[Path, str]  # a module, as a path, and what it is called there; "" for the module


def minutes(words: int, lines: int) -> float:
    """How long so many words of prose and lines of code take to read."""
    return words / WORDS_A_MINUTE + lines / LINES_A_MINUTE


@dataclass
class Section:
    """A section without those below it: what stands before the first heading has the name ""."""

    name: str  # its address within the page
    title: str
    level: int
    words: int = 0
    lines: int = 0

    @property
    def minutes(self) -> float:
        """How long it takes to read."""
        return minutes(self.words, self.lines)


@lru_cache
def outside(text: str) -> list[Part]:
    """The parts of a page that are in no exercise and no solution."""
    return [part for part in parts(_cells(text)) if part.place in ("lesson", "between")]


def _cells(text: str) -> SimpleNamespace:
    """The page as `key.read` reads it, as far as is needed here, in a fiftieth of the time."""
    cells = []
    pieces = _CELL.split(re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S))
    for prose, tags, code in zip(
        pieces[::3], [*pieces[1::3], None], [*pieces[2::3], ""], strict=True
    ):
        cells.append(SimpleNamespace(cell_type="markdown", source=prose.strip("\n")))
        if code:
            found = {"tags": tags.split(", ")} if tags else {}
            cells.append(SimpleNamespace(cell_type="code", source=code.strip("\n"), metadata=found))
    return SimpleNamespace(cells=cells)


def words(prose: str) -> int:
    """Words of prose; of a link its text, of a picture none."""
    prose = re.sub(r"^:{3,}.*$|^`{3,}.*$|^:\w+:.*$", "", prose, flags=re.M)
    prose = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", prose)
    return len(re.sub(r"\]\([^)]*\)", "]", prose).split())


def anchor(heading: str) -> str:
    """The address of a section within its page, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def sections(text: str, root: Path) -> list[Section]:
    """The sections of a page in order, exercises apart; `root` is the course's folder."""
    found = [Section("", "", 1)]
    cells = [part for part in outside(text) if part.kind == "code"]
    names = _imported([part.text for part in cells])
    seen: set[tuple[Path, int]] = set()  # a line that is shown twice is read once
    for part in outside(text):
        if part.kind == "title":
            found.append(Section(anchor(part.text), part.text, 2, words(part.text)))
        elif part.kind == "code":
            if not {"hide-input", "hide-cell"} & {*part.cell.metadata.get("tags", [])}:
                found[-1].lines += sum(bool(line.strip()) for line in part.text.splitlines())
            new = set(_shown(part.text, names, root)) - seen
            found[-1].lines += len(new)
            seen |= new
        else:
            before, *below = re.split(r"^### +(.+)$", part.text, flags=re.M)
            found[-1].words += words(before)
            for title, prose in zip(below[::2], below[1::2], strict=True):
                found.append(Section(anchor(title), title, 3, words(f"{title}\n{prose}")))
    return found


def exercises(text: str) -> list[int]:
    """How long each of a lesson's exercises takes beside the others, in order."""
    titles = re.findall(r"^`{3,}\{exercise-start\} (.+)$", text, re.M)
    levels = [re.search(r"\((\w+)\)$", title) for title in titles]
    return [LEVELS[level[1] if level else "medium"] for level in levels]


def shown(text: str, root: Path) -> set[tuple[Path, int]]:
    """The lines of the package that a page shows with show.source and `changes`, blank ones apart.

    Of what a function became, the lines without those that went.
    """
    cells = [part.text for part in outside(text) if part.kind == "code"]
    names = _imported(cells)
    return {line for cell in cells for line in _shown(cell, names, root)}


def _imported(cells: list[str]) -> dict[str, Name]:
    """What each name that the cells import stands for."""
    names: dict[str, Name] = {}
    for cell in cells:
        for node in ast.walk(ast.parse(cell)) if "import" in cell else []:
            names |= _names(node, ())
    return names


def _names(node: ast.stmt, package: tuple[str, ...]) -> dict[str, Name]:
    """The names that an import in a module of `package` brings."""
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_LATER":  # on demand
        later = ast.literal_eval(node.value)
        return {name: (Path(*module.split(".")), name) for name, module in later.items()}
    if isinstance(node, ast.Import):
        whole = {a.asname or a.name.split(".")[0]: a for a in node.names}
        return {n: (Path(*(a.name if a.asname else n).split(".")), "") for n, a in whole.items()}
    if not isinstance(node, ast.ImportFrom):
        return {}
    home = package[: len(package) - node.level + 1] if node.level else ()
    home = (*home, *(node.module.split(".") if node.module else ()))
    return {a.asname or a.name: (Path(*home), a.name) for a in node.names}


def _shown(cell: str, names: dict[str, Name], root: Path) -> Iterator[tuple[Path, int]]:
    calls = ast.walk(ast.parse(cell)) if "show.source" in cell or "changes(" in cell else []
    for node in calls:
        call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if call not in ("show.source", "changes"):
            continue
        dotted = [ast.unparse(thing).split(".") for thing in node.args]
        known = [(*names[first], rest) for first, *rest in dotted if first in names]
        places = [_place([*filter(None, [n]), *rest], root, home) for home, n, rest in known]
        if call == "changes":
            yield from _changed(*places)
            continue
        for path, begin, end in filter(None, places):
            full = enumerate(_lines(path)[begin - 1 : end], begin)
            yield from ((path, number) for number, line in full if line.strip())


def _changed(old: Place | None, new: Place | None) -> Iterator[tuple[Path, int]]:
    """The lines that `show.changes` shows of `new`."""
    if not old or not new:
        return
    (before, after) = (_lines(path)[begin - 1 : end] for path, begin, end in (old, new))
    for group in SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(1):
        for _, _, _, begin, end in group:
            yield from ((new[0], new[1] + n) for n in range(begin, end) if after[n].strip())


def _place(dotted: list[str], root: Path, module: Path) -> Place | None:
    """Where what has a dotted name in the module is defined; None outside of the course."""
    folder = root / "code" / module
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not dotted:
        return (path, 1, len(_lines(path))) if path.is_file() else None
    body = _parsed(path, path.stat().st_mtime_ns).body if path.is_file() else []
    package = module.parts if folder.is_dir() else module.parts[:-1]
    found: ast.stmt | None = None
    for number, word in enumerate(dotted):
        brought = [names[word] for node in body if word in (names := _names(node, package))]
        if brought and brought[-1] != (module, word):
            home, name = brought[-1]
            return _place([*filter(None, [name]), *dotted[number + 1 :]], root, home)
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        here = [node for node in body if isinstance(node, kinds) and node.name == word]
        if not here:
            below = folder / word
            deeper = below.is_dir() or below.with_suffix(".py").is_file()
            return _place(dotted[1:], root, module / word) if deeper and not number else None
        found = here[-1]
        body = found.body
    begin = min([found.lineno, *(mark.lineno for mark in found.decorator_list)])
    return path, begin, found.end_lineno or begin


@lru_cache
def _parsed(path: Path, _changed_at: int) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()
