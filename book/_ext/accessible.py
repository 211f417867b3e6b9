"""Repair what stands between a page and readers who hear it or use the keyboard alone.

All of it is markup of the theme, of Sphinx or of docutils that the book cannot choose.
"""

from __future__ import annotations

import re
from html import escape
from itertools import zip_longest

from markup import CELL, ROW, plain

# What a page says, and what it should say instead. Each can be applied twice.
REPAIRS = [
    # The landing page has the book's own name, which the theme adds to every title.
    (re.compile(r"<title>(.*?) (?:&#8212;|—) \1</title>"), r"<title>\1</title>"),
    # docutils gives a citation a role that ARIA 1.2 and 1.3 give up, inside a list without items.
    (re.compile(r' role="doc-biblioentry"'), ' role="listitem"'),
    # A corner of a table without a word in it heads nothing.
    (re.compile(r'<th class="head[^"]*">(<p></p>)?</th>'), "<td></td>"),
    # A folded cell's line says what is in it; this label would be read in its place.
    (re.compile(r'<summary aria-label="Toggle hidden content">'), "<summary>"),
    # The logo stands beside the title, which says the same: as an ornament it is not said twice.
    (re.compile(r'(<img\b[^>]*class="logo__image[^>]*?\balt=")[^"]*"'), r'\1"'),
    # The side bar is a part of the page that can be jumped to and skipped.
    (
        re.compile(r'<div id="pst-primary-sidebar" class'),
        '<div id="pst-primary-sidebar" role="complementary" aria-label="Book" class',
    ),
    (
        re.compile(r'<dialog id="pst-search-dialog">'),
        '<dialog id="pst-search-dialog" aria-label="Search">',
    ),
    (
        re.compile(r'<dialog id="pst-(primary|secondary)-sidebar-modal">'),
        r'<dialog id="pst-\1-sidebar-modal" aria-label="Contents">',
    ),
    # Three parts of the theme each say how wide a page is.
    (
        re.compile(
            r'(<meta name="viewport"[^>]*>)(.*?)(?:\s*<meta name="viewport"[^>]*>)+', re.DOTALL
        ),
        r"\1\2",
    ),
]

# What does not fit on a phone: there each row of a table becomes a list (course.css).
COLUMNS = 4  # more than these
WIDTH = 42  # or the columns' longest words, in characters, with two for a column's edges
_TABLE = re.compile(r'<table class="((?:docutils|table)\b[^"]*)"[^>]*>.*?</table>', re.DOTALL)
_HEAD = re.compile(r"<thead>.*?</thead>", re.DOTALL)
_CODE = re.compile(r'(?<=<span class="pre">)[^<]+')
_BREAK = re.compile(r"(?<=[_.(])(?=\w)|(?<=[a-z])(?=[A-Z])")  # where a long name may be broken


def repaired(text: str) -> str:
    """The page `text` with all repairs."""
    for found, better in REPAIRS:
        text = found.sub(better, text)
    return _TABLE.sub(_narrow, text)


def _narrow(match: re.Match[str]) -> str:
    """A table for narrow screens.

    Its long names break where words meet; where it does not fit, each cell knows its column's head.
    """
    table = _CODE.sub(lambda code: _BREAK.sub("<wbr>", code[0]), match[0])
    head = _HEAD.search(table)
    if head is None or "data-head" in table:
        return table
    names = [escape(plain(cell[3]).strip()) for cell in CELL.finditer(head[0])]
    if len(names) <= COLUMNS and _width(table) <= WIDTH:
        return table

    def row(found: re.Match[str]) -> str:
        heads = iter(names)
        return CELL.sub(
            lambda cell: f'<{cell[1]}{cell[2]} data-head="{next(heads, "")}">{cell[3]}</{cell[1]}>',
            found[0],
        )

    body = ROW.sub(row, table[head.end() :])
    marked = table[: head.end()].replace(f'class="{match[1]}"', f'class="{match[1]} narrows"', 1)
    return marked + body


def _width(table: str) -> int:
    """How many characters wide a table is at least: no word is broken."""
    rows = [CELL.findall(row) for row in ROW.findall(table)]
    texts = [[plain(text.replace("<wbr>", " ")) for _, _, text in row] for row in rows]
    longest = [[max(map(len, text.split()), default=0) for text in row] for row in texts]
    return sum(max(column) + 2 for column in zip_longest(*longest, fillvalue=0))
