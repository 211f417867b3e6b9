"""Drawings and code listings that a browser need not lay out while they are far from the screen."""

from __future__ import annotations

import re
from html import unescape

# With a drawing's proportions and a listing's height known, a browser leaves them without layout
# while they are far away, and nothing moves when the reader comes near (`afar`, in the styles).
_SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
_PRE = re.compile(r"(<div class=\"highlight\">\s*)?<pre>(.*?)</pre>", re.DOTALL)
_SPAN = re.compile(r'<span class="(\w+)">([^<]*)</span>')
LINES = 6  # a listing of at least so many lines is laid out when the reader comes near it;
COLUMNS = 90  # characters of code that fit into a line where lines wrap (course.css)
MARKS = 40  # and so is a drawing of at least so many tags


def far(svg: str) -> str:
    """The drawing with its proportions as a style: it need not be laid out to have its height."""
    end = svg.index(">")
    opening, rest = svg[:end], svg[end:]
    box = re.search(r'viewBox="([^"]+)"', opening)
    if not box or rest.count("<") < MARKS or "aspect-ratio" in opening:
        return svg
    wide, high = box[1].replace(",", " ").split()[2:]
    for name, value, between in (
        ("class", "afar", " "),
        ("style", f"aspect-ratio: {wide} / {high}", "; "),
    ):
        there = re.search(rf'\s{name}="([^"]*?);?\s*"', opening)
        both = f' {name}="{there[1] + between if there else ""}{value}"'
        opening = opening.replace(there[0], both, 1) if there else opening + both
    return opening + rest


def drawings(page: str) -> str:
    """The page whose large drawings have known proportions."""
    return _SVG.sub(lambda match: far(match[0]), page)


def plain(pygments: str) -> set[str]:
    """The classes of code that look like code without a class, in every theme of a style sheet."""
    base: dict[str, str] = {}
    look: dict[str, dict[str, str]] = {}
    rule = re.compile(r"^(.*?)\.highlight(?: \.(\w+))? \{([^}]*)\}", re.MULTILINE)
    for theme, name, style in rule.findall(pygments):
        color = re.search(r"(?:^|[;\s])color:\s*(#\w+)", style)
        if not name:
            if color:
                base[theme] = color[1].lower()
        else:
            only = re.fullmatch(r"\s*color:\s*#\w+;?\s*", style)
            look.setdefault(name, {})[theme] = color[1].lower() if color and only else "other"
    return {name for name, themes in look.items() if base and themes == base}


def listings(page: str, plain: set[str]) -> str:
    """The page with fewer elements in its code, and with the height of its long listings.

    With the height known, a browser can leave a listing that is far away without layout, and
    nothing moves when it comes near. On a phone lines do not wrap, and are all that it needs; on
    wider screens a line of more than COLUMNS characters takes two rows.
    """

    def shorter(match: re.Match[str]) -> str:
        inner = _SPAN.sub(lambda m: m[2] if m[1] in plain else m[0], match[2])
        text = re.sub(r"<[^>]*>", "", inner)
        lines = text.rstrip("\n").count("\n") + (not inner.startswith("\n"))
        wide = sum(len(unescape(line)) > COLUMNS for line in text.splitlines())
        height = f"--lines: {lines}" + (f"; --rows: {lines + wide}" if wide else "")
        if not match[1] or lines < LINES or 'id="L' in inner:
            return f"{match[1] or ''}<pre>{inner}</pre>"
        return f'{match[1]}<pre class="afar" style="{height}">{inner}</pre>'

    return _PRE.sub(shorter, page)
