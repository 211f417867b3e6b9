"""How long a page takes to read: section by section, its words and the code that it shows.

    >>> sum(section.minutes for section in sections(text))

Nobody was timed. Minutes are counted: so many words and so many lines of code a minute as a
newcomer reads who wants to understand. What a page folds, its exercises and solutions are apart.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardlab.common.show.changes import changed

from .key import read
from .reading import Part, parts

# How fast one reads: prose with formulas and pictures, and code that one wants to understand.
WORDS_A_MINUTE, LINES_A_MINUTE = 150, 8
LEVELS = {"easy": 1, "medium": 2, "hard": 3, "design": 3}  # exercises' times beside one another


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
    return [part for part in parts(read(text)) if part.place in ("lesson", "between")]


def words(prose: str) -> int:
    """Words of prose; of a link its text, of a picture none."""
    prose = re.sub(r"^:{3,}.*$|^`{3,}.*$|^:\w+:.*$", "", prose, flags=re.M)
    prose = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", prose)
    return len(re.sub(r"\]\([^)]*\)", "]", prose).split())


def anchor(heading: str) -> str:
    """The address of a section within its page, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def sections(text: str) -> list[Section]:
    """The sections of a page in order, exercises apart."""
    found = [Section("", "", 1)]
    cells = [part for part in outside(text) if part.kind == "code"]
    names = imported([part.text for part in cells])
    seen: set[tuple[str, int]] = set()  # a line that is shown twice is read once
    for part in outside(text):
        if part.kind == "title":
            found.append(Section(anchor(part.text), part.text, 2, words(part.text)))
        elif part.kind == "code":
            if not {"hide-input", "hide-cell"} & {*part.cell.metadata.get("tags", [])}:
                found[-1].lines += sum(bool(line.strip()) for line in part.text.splitlines())
            new = set(shown(part.text, names)) - seen
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


def imported(cells: list[str]) -> dict[str, Any]:
    """What the cells import from the course's packages, by its name there."""
    space: dict[str, Any] = {}
    for cell in cells:
        for node in ast.walk(ast.parse(cell)) if "shard" in cell else []:
            if isinstance(node, ast.Import | ast.ImportFrom) and "shard" in ast.unparse(node):
                exec(compile(ast.Module([node], []), "<imports>", "exec"), space)
    return space


def shown(cell: str, names: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The lines (file, number) that a cell shows by show.source and `changes`, blank ones apart."""
    calls = ast.walk(ast.parse(cell)) if "show.source" in cell or "changes(" in cell else []
    for node in calls:
        call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if call not in ("show.source", "changes"):
            continue
        try:
            things = [inspect.unwrap(eval(ast.unparse(thing), names)) for thing in node.args]
        except NameError:  # defined by the page itself, in a cell that is read already
            continue
        if call == "changes":  # of what a function became, the lines without those that went
            path = inspect.getsourcefile(things[1]) or ""
            yield from (
                (path, n) for sign, n, code in changed(*things) if n and code and sign != "-"
            )
            continue
        for thing in things:
            path = inspect.getsourcefile(thing) or ""
            lines, begin = inspect.getsourcelines(thing)
            full = enumerate(lines, max(begin, 1))  # of a module it begins with 0
            yield from ((path, n) for n, line in full if line.strip())
