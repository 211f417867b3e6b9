"""Show the difference between two functions on a page: added and removed lines."""

from __future__ import annotations

import difflib
import html
import inspect
from pathlib import Path
from typing import Any

from shardlab.common import stale_code

from . import DisplayResult, _display, _link_line, _relative_path

_BACKGROUNDS = {"+": "rgba(0,158,115,.16)", "-": "rgba(213,94,0,.16)", " ": "transparent"}


def show_diff(old: Any, new: Any) -> DisplayResult:
    """Show the diff of two functions, classes or modules, with one line of context."""
    stale_code.warn_stale_modules()
    old, new = inspect.unwrap(old), inspect.unwrap(new)
    path, lines = Path(inspect.getsourcefile(new) or "").resolve(), diff_lines(old, new)
    if not lines:
        raise ValueError(f"new={new!r}: must differ from old={old!r}")
    first = next((number for sign, number, _ in lines if number and sign != " "), 1)
    margin = min((len(c) - len(c.lstrip()) for _, n, c in lines if n and c), default=0)
    marks = [sign for sign, *_ in lines]
    codes = [code[margin:] if number else code for _, number, code in lines]
    name = f"new in {getattr(new, '__module__', new.__name__).rpartition('.')[2]}"
    _, caption = _link_line(path, first)
    body = f'<div class="highlight"><pre>{_highlight_diff(marks, codes)}</pre></div>'
    caption = f'<p class="source-caption">{html.escape(name)}, from {caption}</p>'
    page = f'<div class="shown-source">{caption}{body}</div>'
    plain = [f"{sign} {code}".rstrip() for sign, code in zip(marks, codes, strict=True)]
    text = "\n".join([f"# {name}, from {_relative_path(path)}", *plain])
    return _display(page, text, f"{name}: {_relative_path(path)}:{first}")


def diff_lines(old: Any, new: Any) -> list[tuple[str, int, str]]:
    """Return the diff as (sign, line number, text); number 0 marks lines that are left out.

    Lines with "-" are numbered in the file of `old`, all others in the file of `new`.
    """
    (before, old_start), (after, new_start) = map(inspect.getsourcelines, (old, new))
    before, after = ([line.rstrip("\n") for line in lines] for lines in (before, after))
    old_start, new_start = max(old_start, 1), max(new_start, 1)  # inspect returns 0 for a module
    found: list[tuple[str, int, str]] = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(1):
        found += [(" ", 0, "⋯")] * bool(found)
        for kind, a, b, c, d in group:
            if kind != "equal":
                found += [("-", old_start + n, before[n]) for n in range(a, b)]
            sign = " " if kind == "equal" else "+"
            found += [(sign, new_start + n, after[n]) for n in range(c, d)]
    return found


def _highlight_diff(marks: list[str], codes: list[str]) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    pages = highlight("\n".join(codes), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    body = []
    for sign, code, page in zip(marks, codes, pages.split("\n"), strict=False):
        style = f"display:inline-block;min-width:100%;background:{_BACKGROUNDS[sign]}"
        body.append(f'<span style="{style}">{sign} {page if code != "⋯" else code}</span>')
    return "\n".join(body)
