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
from io import BytesIO
from pathlib import Path

import lightningcss
from fontTools import subset
from fontTools.ttLib import TTFont

_URL = re.compile(r"url\(\s*(['\"]?)([^'\")]+)\1\s*\)")
_IMPORT = re.compile(r"@import\s+(?:url\()?['\"]?([^'\")]+)['\"]?\)?\s*;")
_NAME = re.compile(r"[.#]((?:[\w-]|\\.)+)")
_OLDEST = ["supports css-cascade-layers"]  # browsers, of 2022
_MOVEMENT = re.compile(r"@(?:-\w+-)?keyframes ([\w-]+)")


def read(folder: Path, name: str) -> str:
    """The style sheet `name` of `folder`, its imports in place, its addresses seen from there."""
    text = (folder / name).read_text("utf-8")
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


def purge(css: str, words: set[str]) -> str:
    """The style sheet, tight, without what an element with classes and ids of `words` cannot need.

    What stands in `:not(.x)` and `[class*="x"]` is taken to match.
    """
    named = {re.sub(r"\\(.)", r"\1", name) for name in _NAME.findall(css)}
    css = _tight(css, named - words)
    rest = _MOVEMENT.sub("", css)
    moves = {name for name in _MOVEMENT.findall(css) if not re.search(rf"[ :,]{name}\b", rest)}
    return _tight(css, moves)


def _tight(css: str, unused: set[str]) -> str:
    return lightningcss.process_stylesheet(css, unused_symbols=unused, browsers_list=_OLDEST)


def icons(css: str, folder: Path, words: set[str]) -> str:
    """The style sheet with the icons that it names inside it, instead of whole icon fonts.

    The theme's `fa-solid-900` has 1,400 icons, of which the site shows a dozen; the regular and the
    brand icons go when no page has their class.
    """
    codes = {ord(sign) for sign in css if "\ue000" <= sign <= "\uf8ff"}

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
    return icons(css, folder, words)
