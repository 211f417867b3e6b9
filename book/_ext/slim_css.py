"""One style sheet out of many, without the rules that no page of the site can need.

A rule stays when every class and id that its selector names occurs among the site's words: what
stands in a `class` or an `id`, and every word of every script. That keeps too much rather than too
little. Nothing here knows Sphinx: text goes in, and text comes out.
"""

from __future__ import annotations

import base64
import logging
import posixpath
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont

_STRING = r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\''
_COMMENT = re.compile(rf"({_STRING})|/\*.*?\*/", re.DOTALL)
_MARK = re.compile(rf"{_STRING}|\\.|[{{}};]", re.DOTALL)
_SPACE = re.compile(rf"({_STRING})|\s*([{{}};,])\s*|\s+", re.DOTALL)
_URL = re.compile(r"url\(\s*(['\"]?)([^'\")]+)\1\s*\)")
_IMPORT = re.compile(r"@import\s+(?:url\()?['\"]?([^'\")]+)['\"]?\)?\s*;")
_NAME = re.compile(r"[.#]((?:[\w-]|\\.)+)")
_INNER = re.compile(r"\([^()]*\)|\[[^\]]*\]")
_GROUPS = ("@media", "@supports", "@layer", "@container")


def read(folder: Path, name: str) -> str:
    """The style sheet `name` of `folder`, its imports in place, its addresses seen from there."""
    text = _COMMENT.sub(r"\1", (folder / name).read_text("utf-8"))
    below = posixpath.dirname(name)

    def moved(match: re.Match[str]) -> str:
        address = match[2]
        if not re.match(r"[a-z]+:|[/#]", address):
            address = posixpath.normpath(posixpath.join(below, address))
        return f'url("{address}")' if '"' not in address else match[0]

    def imported(match: re.Match[str]) -> str:
        return read(folder, posixpath.normpath(posixpath.join(below, match[1])))

    pieces = []  # an imported sheet is seen from its own place already
    last = 0
    for match in _IMPORT.finditer(text):
        pieces += [_URL.sub(moved, text[last : match.start()]), imported(match)]
        last = match.end()
    return "".join(pieces) + _URL.sub(moved, text[last:])


def blocks(css: str) -> Iterator[tuple[str, str | None]]:
    """The rules of a style sheet without comments: prelude and body, which a statement lacks."""
    depth, start, opened = 0, 0, 0
    for match in _MARK.finditer(css):
        mark = match[0]
        if mark == "{":
            depth += 1
            if depth == 1:
                opened = match.end()
        elif mark == "}":
            depth -= 1
            if depth == 0:
                yield css[start : opened - 1].strip(), css[opened : match.start()]
                start = match.end()
        elif mark == ";" and depth == 0:
            yield css[start : match.start()].strip(), None
            start = match.end()


def selectors(prelude: str) -> list[str]:
    """The selectors of a list, divided at the commas that stand in no bracket and no string."""
    found, depth, last = [], 0, 0
    for match in re.finditer(rf"{_STRING}|\\.|[()\[\],]", prelude):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(match[0], 0)
        if match[0] == "," and depth == 0:
            found.append(prelude[last : match.start()])
            last = match.end()
    return [selector.strip() for selector in [*found, prelude[last:]]]


def needed(selector: str, words: set[str]) -> bool:
    """Whether an element with classes and ids among `words` can match the selector.

    What stands in brackets, such as `:not(.x)` and `[class*="x"]`, is taken to match.
    """
    outer = re.sub(_STRING, "", selector)
    while _INNER.search(outer):
        outer = _INNER.sub("", outer)
    return all(re.sub(r"\\(.)", r"\1", name) in words for name in _NAME.findall(outer))


def purge(css: str, words: set[str]) -> str:
    """The style sheet without the rules that nothing made of `words` can match."""
    kept = []
    for prelude, body in blocks(css):
        if body is None:
            kept.append(f"{prelude};")
        elif prelude.startswith(_GROUPS):
            inner = purge(body, words)
            if inner:
                kept.append(f"{prelude}{{{inner}}}")
        elif prelude.startswith("@"):
            kept.append(f"{prelude}{{{body}}}")
        else:
            left = [selector for selector in selectors(prelude) if needed(selector, words)]
            if left and body.strip():
                kept.append(f"{','.join(left)}{{{body}}}")
    return "".join(kept)


def tight(css: str) -> str:
    """The style sheet without the white space that means nothing."""
    return _SPACE.sub(lambda m: m[1] or m[2] or " ", css).replace(";}", "}").strip()


def without_idle(css: str) -> str:
    """The style sheet without movements and fonts that no rule of it names."""
    rest = "".join(f"{p}{{{b}}}" for p, b in blocks(css) if not p.startswith("@keyframes"))
    kept = []
    for prelude, body in blocks(css):
        name = prelude.partition(" ")[2].strip()
        if prelude.startswith("@keyframes") and not re.search(
            rf"(?<![\w-]){re.escape(name)}(?![\w-])", rest
        ):
            continue
        kept.append(f"{prelude};" if body is None else f"{prelude}{{{body}}}")
    return "".join(kept)


def icons(css: str, folder: Path, words: set[str]) -> str:
    """The style sheet with the icons that it names inside it, instead of whole icon fonts.

    The theme's `fa-solid-900` has 1,400 icons, of which the site shows a dozen; the regular and the
    brand icons go when no page has their class.
    """
    codes = {int(code, 16) for code in re.findall(r"\\([ef][0-9a-f]{3})", css)}

    def face(match: re.Match[str]) -> str:
        source = re.search(r'url\("?([^")]*/fa-(\w+)-\d+\.)(?:woff2|ttf)', match[0])
        if not source:
            return match[0]
        path = folder / f"{source[1]}ttf"
        if source[2] != "solid" and not words & {f"fa-{source[2]}", f"fa{source[2][0]}"}:
            return ""
        if not path.is_file():
            return match[0]
        data = base64.b64encode(font(path, codes)).decode()
        source_list = f'src:url("data:font/woff;base64,{data}") format("woff")'
        return re.sub(r"src:(?:url\([^)]*\)|[^;}])*", source_list, match[0])

    return re.sub(r"@font-face\s*\{[^}]*\}", face, css)


def font(path: Path, codes: set[int]) -> bytes:
    """The glyphs `codes` of a font, as WOFF, which needs nothing but zlib."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports each table that it drops
    options = subset.Options()
    options.hinting = options.layout_closure = False
    options.layout_features = []
    options.name_IDs = [0, 13, 14]  # the copyright and the licence stay
    options.glyph_names = False
    found = TTFont(path, recalcTimestamp=False)
    maker = subset.Subsetter(options)
    maker.populate(unicodes=codes)
    maker.subset(found)
    found.flavor = "woff"
    data = BytesIO()
    found.save(data, reorderTables=False)
    return data.getvalue()


def bundle(folder: Path, names: list[str], words: set[str]) -> str:
    """The style sheets `names` of `folder` as one, with nothing that `words` cannot need."""
    css = purge("\n".join(read(folder, name) for name in names), words)
    return tight(icons(without_idle(css), folder, words))
