"""Repair what stands between a page and readers who hear it or use the keyboard alone.

All of it is markup of the theme, of Sphinx or of docutils that the book cannot choose.
"""

from __future__ import annotations

import re

# What a page says, and what it should say instead. Each can be applied twice.
REPAIRS = [
    # The landing page has the book's own name, which the theme adds to every title.
    (re.compile(r"<title>(.*?) (?:&#8212;|—) \1</title>"), r"<title>\1</title>"),
    # docutils gives a citation a role that ARIA 1.2 and 1.3 give up, inside a list without items.
    (re.compile(r' role="doc-biblioentry"'), ' role="listitem"'),
    # A corner of a table without a word in it heads nothing.
    (re.compile(r'<th class="head[^"]*">(<p></p>)?</th>'), "<td></td>"),
    # A fold's own line is a button, and a link inside a button is neither.
    (
        re.compile(
            r'<summary>((?:(?!</summary>).)*?)<a class="source-link" href="([^"]*)">(.*?)</a>'
            r"((?:(?!</summary>).)*)</summary>",
            re.DOTALL,
        ),
        r'<summary>\1\3\4</summary><p class="source-caption">'
        r'The whole file: <a class="source-link" href="\2">\3</a></p>',
    ),
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


def repaired(text: str) -> str:
    """The page `text` with all repairs."""
    for found, better in REPAIRS:
        text = found.sub(better, text)
    return text
