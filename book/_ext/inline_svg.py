"""Embedding of SVG pictures in the page, so that `currentColor` is the page's text colour.

One file then serves the light and the dark theme, and its text can be selected and searched. In
Jupyter and on a code host the same markdown image is a plain picture.

No picture shrinks until its text is unreadable: on a phone its box scrolls instead.
"""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path

from bs4 import BeautifulSoup
from docutils import nodes
from sphinx.application import Sphinx

_ID = re.compile(r'\bid="([^"]+)"')
_USE = re.compile(r'(\b(?:xlink:)?href="#|url\(#|aria-(?:labelledby|describedby)=")([^")]+)')
_SIZE = re.compile(r'\s(?:width|height|role|aria-label|aria-labelledby)="[^"]*"')
# A standalone file needs a title and colours of its own; an embedded one uses the page's.
_STANDALONE_PARTS = re.compile(r"<(title|metadata|desc|style)\b.*?</\1>\s*", re.DOTALL)
_FONT = re.compile(r'\bfont(?:-size)?(?:: ?|=")[^;"]*?([\d.]+)px')  # the font size
MIN_FONT_PIXELS = 9  # CSS pixels: smaller text may be unreadable on a phone


def compute_width_style(opening: str, rest: str) -> str:
    """Return the styles `width` and `min-width` of a picture: as drawn, and for readable text.

    opening: the attributes of its <svg>. rest: its content. Returns "" if it has no width.
    """
    wide = re.search(r'\swidth="([\d.]+)(pt|px)?"', opening)
    if not wide:
        return ""
    # matplotlib writes points, of 4/3 pixels each.
    pixels = math.ceil(float(wide[1]) * (4 / 3 if wide[2] == "pt" else 1) - 0.01)
    box = re.search(r'(?i)viewBox="[-\d.]+ [-\d.]+ ([\d.]+)', opening)
    sizes = [float(size) for size in _FONT.findall(opening + rest)]
    least = math.ceil(MIN_FONT_PIXELS * float(box[1]) / min(sizes)) if box and sizes else 0
    return f"width: {pixels}px; min-width: {min(least, pixels)}px"


def embed_svg(text: str, prefix: str, alt: str) -> str:
    """Return the SVG document `text` as an element: `alt` labels it, `prefix` starts its ids."""
    start = text.index("<svg")
    end = text.index(">", start)
    opening, rest = text[start:end], text[end : text.rindex("</svg>") + len("</svg>")]
    size = compute_width_style(opening, rest)
    style = f' style="{size}"' if size else ""
    # Screen readers skip the children of role="img", so a picture with links is a group.
    role = "group" if "<a " in rest else "img"
    label = f'role="{role}" aria-label="{escape(alt)}"' if alt else 'aria-hidden="true"'
    opening = _SIZE.sub("", opening) + f" {label}{style}"
    rest = _STANDALONE_PARTS.sub("", rest)
    rest = _ID.sub(rf'id="{prefix}\1"', rest)
    rest = _USE.sub(rf"\1{prefix}\2", rest)
    return opening + rest


def embed_pictures(app: Sphinx, doctree: nodes.document) -> None:
    """Replace the SVG images of a page by their content."""
    for number, image in enumerate(list(doctree.findall(nodes.image))):
        uri = image.get("uri", "")
        path = Path(app.srcdir, uri)
        # Outputs of cells stay unchanged: they are outside the source folder's pictures.
        if not uri.endswith(".svg") or "://" in uri or not path.is_file():
            continue
        markup = embed_svg(path.read_text("utf-8"), f"svg{number}-", image.get("alt", ""))
        classes = " ".join(["inline-svg", *image.get("classes", [])])
        raw = nodes.raw("", f'<span class="{classes}">{markup}</span>', format="html")
        image.replace_self(raw)


def add_captions(body: BeautifulSoup) -> None:
    """Give each picture that stands alone a number, and its description as a visible caption.

    Drawings and pictures of cells get the same frame: a figure with a box that scrolls.
    """
    alone = "section > p:has(> .inline-svg:only-child), figure.shown-figure:has(> svg)"
    for number, figure in enumerate(body.select(alone), 1):
        svg = figure.svg
        if figure.name == "figure":
            svg.wrap(body.new_tag("span", attrs={"class": "inline-svg"}))
        figure.name, figure["class"] = "figure", "captioned"
        caption = body.new_tag(
            "figcaption", attrs={"class": "picture-caption", "aria-hidden": "true"}
        )
        caption.append(body.new_tag("strong", string=f"Figure {number}."))
        caption.append(f" {svg['aria-label']}")  # which is read aloud already
        figure.append(caption)


def set_output_widths(body: BeautifulSoup) -> None:
    """Set the widths of pictures in cells' outputs, which are already in the page."""
    for svg in body.select("figure.shown-figure > svg:not([style])"):
        html = str(svg)
        opening, _, rest = html.partition(">")
        if size := compute_width_style(opening, rest):
            svg["style"] = size
