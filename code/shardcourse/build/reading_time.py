"""Estimate of the reading time of a page's sections, from their words and lines of code.

    >>> sum(section.minutes for section in sections(text))

The minutes are computed, not measured: words and lines of code, at the pace of a newcomer who
reads to understand. Folded text, exercises and solutions are not counted.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

from shardlab.common.show import ROOT
from shardlab.common.show.diff import diff_lines

from .key import parse_notebook
from .notebook_export import Part, split_parts

# Reading pace for prose with formulas and pictures, and for code that is read to be understood.
WORDS_PER_MINUTE, LINES_PER_MINUTE = 150, 8
LEVEL_WEIGHTS = {"easy": 1, "medium": 2, "hard": 3, "design": 3}  # relative times of exercises


def estimate_minutes(words: int, lines: int) -> float:
    """Return the minutes to read `words` words of prose and `lines` lines of code."""
    return words / WORDS_PER_MINUTE + lines / LINES_PER_MINUTE


@dataclass
class Section:
    """Section without its subsections; the text before the first heading has the name ""."""

    name: str  # its anchor in the page
    title: str
    level: int
    words: int = 0
    lines: int = 0

    @property
    def minutes(self) -> float:
        """Minutes to read the section."""
        return estimate_minutes(self.words, self.lines)


@lru_cache
def list_lesson_parts(text: str) -> list[Part]:
    """Return the parts of a page that are outside exercises and solutions."""
    parts = split_parts(parse_notebook(text))
    return [part for part in parts if part.place in ("lesson", "between")]


def count_words(prose: str) -> int:
    """Count the words of prose: a link counts with its text, a picture not at all."""
    prose = re.sub(r"^:{3,}.*$|^`{3,}.*$|^:\w+:.*$", "", prose, flags=re.M)
    prose = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", prose)
    return len(re.sub(r"\]\([^)]*\)", "]", prose).split())


def make_anchor(heading: str) -> str:
    """Return the anchor of a section in its page, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def split_sections(text: str) -> list[Section]:
    """Return the sections of a page in order, without exercises."""
    return [Section(*one) for one in _keep(text, lambda: map(astuple, _split_sections(text)))]


def _split_sections(text: str) -> list[Section]:
    found = [Section("", "", 1)]
    cells = [part.text for part in list_lesson_parts(text) if part.kind == "code"]
    shown = iter(_keep(cells, lambda: _iter_shown_counts(cells)))
    for part in list_lesson_parts(text):
        if part.kind == "title":
            found.append(Section(make_anchor(part.text), part.text, 2, count_words(part.text)))
        elif part.kind == "code":
            if not {"hide-input", "hide-cell"} & {*part.cell.metadata.get("tags", [])}:
                found[-1].lines += sum(bool(line.strip()) for line in part.text.splitlines())
            found[-1].lines += next(shown)
        else:
            before, *below = re.split(r"^### +(.+)$", part.text, flags=re.M)
            found[-1].words += count_words(before)
            for title, prose in zip(below[::2], below[1::2], strict=True):
                words = count_words(f"{title}\n{prose}")
                found.append(Section(make_anchor(title), title, 3, words))
    return found


def get_exercise_weights(text: str) -> list[int]:
    """Return the relative time of each of a lesson's exercises, in order."""
    titles = re.findall(r"^`{3,}\{exercise-start\} (.+)$", text, re.M)
    levels = [re.search(r"\((\w+)\)$", title) for title in titles]
    return [LEVEL_WEIGHTS[level[1] if level else "medium"] for level in levels]


@lru_cache
def hash_code() -> str:
    """Return a hash of the course's packages."""
    paths = sorted((ROOT / "code").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _keep(inputs: Any, compute: Callable[[], Iterable]) -> list:
    """Return the items of `compute()`; they are kept beside the built site, for equal inputs."""
    key = hashlib.sha256(repr((inputs, hash_code())).encode()).hexdigest()
    kept = ROOT / "_build/reading_times" / key
    with suppress(OSError, ValueError):
        return json.loads(kept.read_text())
    found = list(compute())
    with suppress(OSError):  # a folder that cannot be written
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return found


def _iter_shown_counts(cells: list[str]) -> Iterator[int]:
    """Yield the number of package lines that each cell shows; a line shown twice counts once."""
    names, seen = collect_imports(cells), set()  # imports take seconds
    for cell in cells:
        new = set(iter_shown_lines(cell, names)) - seen
        yield len(new)
        seen |= new


def collect_imports(cells: list[str]) -> dict[str, Any]:
    """Return the objects that the cells import from the course's packages, by name."""
    space: dict[str, Any] = {}
    for cell in cells:
        for node in ast.walk(ast.parse(cell)) if "shard" in cell else []:
            if isinstance(node, ast.Import | ast.ImportFrom) and "shard" in ast.unparse(node):
                exec(compile(ast.Module([node], []), "<imports>", "exec"), space)
    return space


def iter_shown_lines(cell: str, names: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the non-blank lines (file, number) that a cell shows by show.source and `show_diff`."""
    calls = ast.walk(ast.parse(cell)) if "show.source" in cell or "show_diff(" in cell else []
    for node in calls:
        call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if call not in ("show.source", "show_diff"):
            continue
        try:
            things = [inspect.unwrap(eval(ast.unparse(thing), names)) for thing in node.args]
        except NameError:  # defined by an earlier cell of the page
            continue
        if call == "show_diff":  # the new function's lines that differ from the old one's
            path = inspect.getsourcefile(things[1]) or ""
            yield from (
                (path, n) for sign, n, code in diff_lines(*things) if n and code and sign != "-"
            )
            continue
        for thing in things:
            path = inspect.getsourcefile(thing) or ""
            lines, begin = inspect.getsourcelines(thing)
            full = enumerate(lines, max(begin, 1))  # getsourcelines returns 0 for a module
            yield from ((path, n) for n, line in full if line.strip())
