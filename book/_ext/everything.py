"""All chapters on one page: ids told apart, links between chapters turned into links within it.

Nothing here knows Sphinx: a finished page goes in as text, and the chapter comes out as text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape, unescape
from urllib.parse import quote, unquote

from markup import ARTICLE

_TAG = re.compile(r"<([a-zA-Z][\w:-]*)((?:[^\"'>]|\"[^\"]*\"|'[^']*')*)>")
_ATTRIBUTE = re.compile(r"([\w:-]+)=(\"[^\"]*\"|'[^']*')")
_HEADING = re.compile(r"<(/?)h([1-6])(?=[\s>])")
_HEADING_LINK = re.compile(r'<a class="headerlink".*?</a>', re.DOTALL)
_LOCAL_URL = re.compile(r"url\(#([^)]+)\)")
# Attributes that hold the ids of elements of the page, and those that hold addresses.
_IDS = {"id", "for", "headers", "aria-labelledby", "aria-describedby", "aria-controls"}
_ADDRESSES = {"href", "xlink:href", "src"}


@dataclass(frozen=True)
class Chapter:
    """A page of the book: its document's name, its part's caption, and the finished page."""

    docname: str  # "lessons/zero"
    part: str
    page: str

    @property
    def name(self) -> str:
        """What its ids start with, and its own id."""
        return self.docname.rpartition("/")[2]

    @property
    def title(self) -> str:
        """The text of its title, as HTML."""
        title = re.search(r"<h1[^>]*>(.*?)</h1>", self.page, re.DOTALL)
        assert title, f"{self.docname}: a page without a title"
        return _HEADING_LINK.sub("", title[1]).strip()


class Anchors:
    """Where links lead once all chapters stand on one page in the site's top folder."""

    def __init__(self, docnames: Iterable[str]):
        """`docnames`: of the chapters; the first one is the book's landing page."""
        names = list(docnames)
        self.chapters = {f"{name}.html": name.rpartition("/")[2] for name in names}
        assert len(set(self.chapters.values())) == len(names), "two chapters of one name"
        self.chapters["index.html"] = names[0].rpartition("/")[2]

    def address(self, address: str, docname: str) -> str:
        """Where `address`, which stands on the page `docname`, leads; within the page if it can."""
        if re.match(r"[a-zA-Z][\w+.-]*:|//", address):
            return address
        path, mark, fragment = address.partition("#")
        here = f"{docname}.html"
        if path:
            here = posixpath.normpath(posixpath.join(posixpath.dirname(docname), unquote(path)))
        if here in self.chapters:
            name = self.chapters[here]
            return f"#{name}--{fragment}" if fragment else f"#{name}"
        return quote(here, safe="/?=&;%+~,") + mark + fragment

    def moved(self, html: str, docname: str, prefix: str) -> str:
        """`html` of the page `docname` with its addresses, and its ids started with `prefix`."""

        def attribute(match: re.Match[str]) -> str:
            name, value = match[1].lower(), unescape(match[2][1:-1])
            new = value
            if name in _IDS:
                new = " ".join(prefix + word for word in value.split())
            elif name in _ADDRESSES and value:
                new = self.address(value, docname)
            if "url(#" in new:
                new = _LOCAL_URL.sub(rf"url(#{prefix}\1)", new)
            return match[0] if new == value else f'{match[1]}="{escape(new)}"'

        def tag(match: re.Match[str]) -> str:
            inner = match[2]
            if match[1] == "input":  # the names of tabs belong together on their page
                inner = re.sub(r'(\sname=")', rf"\1{prefix}", inner)
            return f"<{match[1]}{_ATTRIBUTE.sub(attribute, inner)}>" if "=" in inner else match[0]

        return _TAG.sub(tag, html)


def lowered(html: str, levels: int) -> str:
    """`html` with its headings `levels` lower, at most h6."""
    return _HEADING.sub(lambda m: f"<{m[1]}h{min(6, int(m[2]) + levels)}", html)


def article(chapter: Chapter, anchors: Anchors, levels: int) -> str:
    """What the chapter says, to stand among the others; its headings `levels` lower."""
    found = ARTICLE.search(chapter.page)
    assert found, f"{chapter.docname}: a page without an article"
    html = anchors.moved(found[1], chapter.docname, f"{chapter.name}--")
    kind = "edition-chapter" if levels else "edition-opening"
    opening = f'<div class="{kind}" id="{chapter.name}">'
    return f"{opening}\n{lowered(html, levels).strip()}\n</div>"


def contents(chapters: list[Chapter]) -> str:
    """The table of contents: parts, chapters, and the sections of each chapter."""
    items, part = [], None
    for chapter in chapters:
        if chapter.part != part:
            items += ["</ul>"] if part is not None else []
            part = chapter.part
            items.append(f'<p class="edition-part-name">{escape(part)}</p>\n<ul>')
        items.append(f'<li><a href="#{chapter.name}">{chapter.title}</a>')
        sections = re.findall(
            r'<section[^>]*\sid="([^"]+)"[^>]*>\s*(?:<span[^>]*></span>\s*)*<h2[^>]*>(.*?)</h2>',
            chapter.page,
            re.DOTALL,
        )
        links = [
            f'<a href="#{chapter.name}--{name}">{_HEADING_LINK.sub("", title).strip()}</a>'
            for name, title in sections
        ]
        items.append(f"<ul>{''.join(f'<li>{link}</li>' for link in links)}</ul>" if links else "")
        items.append("</li>")
    items += ["</ul>"] if part is not None else []
    return "\n".join(items)


def body(chapters: list[Chapter]) -> str:
    """The whole book as the content of one page: landing page, contents, parts.

    `chapters` in order; the first one is the landing page.
    """
    first, rest = chapters[0], chapters[1:]
    anchors = Anchors(chapter.docname for chapter in chapters)
    pieces = [
        article(first, anchors, 0),
        '<nav class="edition-contents" aria-label="All chapters">\n<h2>Contents</h2>',
        f"{contents(rest)}\n</nav>",
    ]
    part = None
    for chapter in rest:
        if chapter.part != part:
            part = chapter.part
            pieces.append(f'<h2 class="edition-part">{escape(part)}</h2>')
        pieces.append(article(chapter, anchors, 2))
    return "\n".join(pieces)
