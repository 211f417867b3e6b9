"""Visible code of a lesson: the share of technique in it, and its reading time.

    python tests/visible.py lessons/zero.md      # figures, and the lines that count as proof

A cell's code is visible unless it has the tag `hide-input`; exercises and solutions do not count. A
line is proof when it belongs to a statement that asserts, compares with a reference, or makes a
table: `assert`, `raise AssertionError`, `show.table`, `show.figure`, assignments to `rows` or
`head`, formatted numbers, a print of several lines.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

from shardcourse.build.reading_time import (
    collect_imports,
    iter_shown_lines,
    list_lesson_parts,
    split_sections,
)
from shardlab.common import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
_MADE = {"rows", "head", "caption", "cells"}  # by the lessons' convention: parts of a table
_SHOWS = {"show.table", "show.figure"}
_COMPARES = {"torch.testing.assert_close", "torch.allclose"}


@dataclass(frozen=True)
class Cell:
    """Code cell: its source without options, its tags."""

    source: str
    tags: frozenset[str]

    @property
    def folded(self) -> bool:
        """True if the page folds the cell to one line."""
        return bool(self.tags & {"hide-input", "hide-cell"})


def list_cells(text: str) -> list[Cell]:
    code = [part for part in list_lesson_parts(text) if part.kind == "code"]
    return [Cell(part.text, frozenset(part.cell.metadata.get("tags", []))) for part in code]


def find_proof_lines(source: str) -> set[int]:
    """Return the line numbers of a cell that assert, compare or make a table."""
    lines: set[int] = set()
    for statement in ast.parse(source).body:
        lines |= _find_proof_lines(statement)
    return lines


def _find_proof_lines(node: ast.stmt) -> set[int]:
    inner = [s for field in ("body", "orelse", "finalbody") for s in getattr(node, field, [])]
    for handler in getattr(node, "handlers", []):
        inner += handler.body
    whole = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if inner:
        found = set().union(*map(_find_proof_lines, inner))
        every = all(_find_proof_lines(s) for s in inner)
        return whole if every and not isinstance(node, ast.FunctionDef | ast.ClassDef) else found
    if isinstance(node, ast.Assert):
        return whole
    if isinstance(node, ast.Raise) and "AssertionError" in ast.unparse(node):
        return whole
    for part in ast.walk(node):
        if isinstance(part, ast.FormattedValue) and part.format_spec is not None:
            return whole
        if isinstance(part, ast.Call):
            name = ast.unparse(part.func)
            if name in _SHOWS | _COMPARES or name == "print" and len(whole) > 1:
                return whole
            if name.split(".")[0] in _MADE and "." in name:
                return whole
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    names = {part.id for t in targets if t for part in ast.walk(t) if isinstance(part, ast.Name)}
    return whole if names & _MADE else set()


def count_proof_lines(text: str) -> tuple[int, int]:
    """Return (lines of proof, lines) of a lesson's visible code, without blank lines."""
    proof = total = 0
    for cell in list_cells(text):
        if not cell.folded:
            full = {n for n, line in enumerate(cell.source.splitlines(), 1) if line.strip()}
            proof, total = proof + len(find_proof_lines(cell.source) & full), total + len(full)
    return proof, total


def count_core_lines(text: str, core: Path) -> tuple[int, int]:
    """Return (lines of the file `core` that the lesson shows, its lines), without blank lines."""
    sources = [cell.source for cell in list_cells(text)]
    names = collect_imports(sources)
    lines = {line for source in sources for line in iter_shown_lines(source, names)}
    there = sum(Path(path).resolve() == core.resolve() for path, _ in lines)
    return there, sum(bool(line.strip()) for line in core.read_text("utf-8").splitlines())


def count_words(text: str) -> int:
    return sum(section.words for section in split_sections(text))


def estimate_minutes(text: str) -> float:
    """Return the reading time of a lesson without exercises: prose, and visible code."""
    return sum(section.minutes for section in split_sections(text))


def find_module(module: str) -> Path | None:
    """Return the folder or file of a topic's module, in whichever package it stands."""
    folders = [ROOT / "code" / name / module for name in PACKAGES]
    found = [p for p in folders if (p / "__init__.py").exists()]
    found += [p.with_suffix(".py") for p in folders if p.with_suffix(".py").exists()]
    return next(iter(found), None)


def find_core(topic: str) -> Path | None:
    place = find_module(topic)
    file = place / "core.py" if place and place.is_dir() else place
    return file if file and file.exists() else None


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        text = path.read_text("utf-8")
        proof, total = count_proof_lines(text)
        share = f"{proof} of {total} visible lines ({100 * proof / total:.1f} %)"
        print(f"{path}: {share} are proof")
        print(f"  {count_words(text)} words: {estimate_minutes(text):.0f} minutes")
        if core := find_core(path.stem):
            there, lines = count_core_lines(text, core)
            part = f"{there} of {lines} lines ({100 * there / lines:.0f} %)"
            print(f"  of {core.relative_to(ROOT)} {part} are on the page")
        for cell in list_cells(text):
            if cell.folded:
                if not cell.source.startswith("# "):
                    print(f"  folded, and no first line says what it does: {cell.source[:50]!r}")
                continue
            for n in sorted(find_proof_lines(cell.source)) if len(paths) == 1 else []:
                print(f"    {cell.source.splitlines()[n - 1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
