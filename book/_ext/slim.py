"""Pages that a phone on a slow line opens quickly: less to load, less to lay out, and later.

At the build's end, on the finished pages:

- The styles that all pages share become one file, without the rules that nothing here can need and
  with the dozen icons that are shown. Their scripts become one file, too, which waits for the page.
- Mathematics is loaded when it is to be seen; the buttons that copy code when the reader first does
  something.
- Listings and drawings lose what does not show (`slim_svg`).
- The page knows at once whether it is light or dark, and is not painted twice.
- What the theme forgets for readers who hear a page is put right (`accessible`).

And every page says with its first words what it is about, for those who list pages.
A build that changes some pages does this to those; the others are as it left them before.
"""

from __future__ import annotations

import hashlib
import re
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import markup
from accessible import repaired
from docutils import nodes
from lesson_page import SLIDES
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

MODEL = "genindex.html"  # every build writes it; it loads what every page does, and nothing more
DONE = "_static/site.css"
_DONE = re.compile(rf'<link rel="stylesheet" href="[^"]*{re.escape(DONE)}\?')
SMALL = 10_000  # bytes of a script that need be no task of its own
_SEARCH = ("searchtools.js", "language_data.js", "searchindex.js")  # the theme still names them
_COPY = ("clipboard.min.js", "copybutton.js")
_MATHS = "mathjax/tex-chtml.js"
_ICONS = "fontawesome.js"  # half a megabyte of icons as a script: the pages use the font
_STYLE = re.compile(r'\s*<link\b[^>]*\brel="stylesheet"[^>]*>')
_SCRIPT = re.compile(r"\s*<script\b([^>]*)>(.*?)</script>", re.DOTALL)
_ADDRESS = re.compile(r'\b(?:src|href)="([^"?]*)(?:\?[^"]*)?"')
_PRELOAD = re.compile(
    r'\s*<link rel="preload" as="script"[^>]*>|\s*<!-- (?:Pre-loaded|So that users).*?-->'
)
_MAP = re.compile(r"\n//# sourceMappingURL=.*")
_WORDS = re.compile(r'\s(?:class|id)="([^"]*)"')
_FAR = (  # not laid out while far from the screen; the sizes are known (see slim_svg)
    "@media screen{.afar{content-visibility:auto}"
    "pre.afar{contain-intrinsic-block-size:auto calc(var(--lines)*1lh)}}"
    "@media screen and (min-width:769px)"
    "{pre.afar{contain-intrinsic-block-size:auto calc(var(--rows,var(--lines))*1lh)}}"
)
_MODE = re.compile(r"document\.documentElement\.dataset\.theme = localStorage[^;]*;")
_SYSTEM = (
    "document.documentElement.dataset.theme = /^(light|dark)$/.test("
    "document.documentElement.dataset.mode) ? document.documentElement.dataset.mode : "
    'matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";'
)


# --- What a page is about ---------------------------------------------------------------------


def describe(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Give the page a description: its title and its first words."""
    title = markup.plain(str(context.get("title", "")))
    title = title or {"search": "Search", "genindex": "Index"}.get(pagename, pagename)
    words = first_words(doctree, max(60, 155 - len(title))) if doctree is not None else ""
    text = f"{title}. {words}" if words else f"{title}: a page of {context.get('docstitle', '')}."
    context["metatags"] = (
        context.get("metatags", "") + f'\n<meta name="description" content="{escape(text)}" />'
    )


def first_words(doctree: nodes.document, limit: int) -> str:
    """The first words of a page's prose and lists, at most `limit` characters of them."""
    text = ""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section | nodes.list_item):
            words = paragraph.findall(nodes.Text)
            prose = "".join(word for word in words if not isinstance(word.parent, nodes.raw))
            text = " ".join([*text.split(), *prose.split()])
        if len(text) > limit:
            return text[: limit - 1].rpartition(" ")[0].rstrip(",;:. ") + "…"
        if len(text) > limit // 2:
            break
    return text


def finished(page: str) -> bool:
    """Whether an earlier build has finished this page."""
    return _DONE.search(page) is not None


# --- Styles and scripts -----------------------------------------------------------------------


def address(tag: str) -> str:
    """The path in the site's folder that a tag's address names, seen from any page of it."""
    match = _ADDRESS.search(tag)
    return match[1].lstrip("./") if match else ""


class Shared(NamedTuple):
    """What all pages load."""

    styles: list[str]  # names, seen from the site's folder
    scripts: list[str]  # names or, of those that stand in the page, the code
    large: list[str]  # names of scripts that stay files of their own, and so tasks of their own


def shared(site: Path) -> Shared:
    """What the page MODEL loads, and so all others."""
    model = (site / MODEL).read_text("utf-8")
    styles = [address(tag) for tag in _STYLE.findall(model)]
    scripts, large = [], []
    for attributes, code in _SCRIPT.findall(model):
        name = address(attributes)
        apart = name.endswith((*_SEARCH, _MATHS, _ICONS)) or "data-cfasync" in attributes
        if apart or "pagename" in code:
            continue
        waits = name and "defer" in attributes and (site / name).stat().st_size > SMALL
        (large if waits else scripts).append(name or code.strip())
    return Shared(styles, scripts, large)


def join(site: Path, scripts: list[str]) -> str:
    """The scripts as one: the first, the settings that stood in the page, then all others.

    Where a script waits for the page, it finds that the page is there already, and starts: its
    settings have to be there as well, even those that the page names after it.
    """
    pieces = []
    in_page = [script for script in scripts[1:] if not script.endswith(".js")]
    for script in dict.fromkeys([*scripts[:1], *in_page, *scripts]):
        code = script
        if script.endswith(".js"):
            code = _MAP.sub("", (site / script).read_text("utf-8"))
        pieces.append(code)
    return "\n;\n".join(pieces)


def vocabulary(pages: list[str], scripts: list[str]) -> set[str]:
    """Every class, every id and every word of a script."""
    words: set[str] = set()
    for page in pages:
        for value in set(_WORDS.findall(page)):
            words.update(value.split())
    for script in scripts:
        words.update(re.findall(r"[A-Za-z_][\w-]*", script))
    return words


# --- A page -----------------------------------------------------------------------------------


def head(page: str, common: Shared, stamps: dict[str, str]) -> str:
    """The page with what it shares with all others taken from the two files."""
    root = re.search(r'data-content_root="([^"]*)"', page)
    up = root[1].removeprefix("./") if root else ""
    maths = re.search(r'class="[^"]*\bmath\b', page) is not None

    def style(match: re.Match[str]) -> str:
        return "" if address(match[0]) in common.styles else match[0]

    def script(match: re.Match[str]) -> str:
        attributes, code = match.groups()
        name = address(attributes)
        if name.endswith((*_SEARCH, _MATHS, _ICONS)) or code.startswith("window.MathJax"):
            return ""
        if name in common.scripts or name in common.large:
            return ""
        if not name and (code.strip() in common.scripts or "pagename" in code):
            return ""
        if name and "defer" not in attributes and "async" not in attributes:
            return match[0].replace("<script", "<script defer", 1)
        return match[0]

    start, end, rest = page.partition("</head>")
    loaded = ["_static/site.js", *common.large, *(["_static/maths.js"] if maths else [])]
    extra = [
        f'<link rel="stylesheet" href="{up}{DONE}?v={stamps[DONE]}" />',
        *(f'<script defer src="{up}{name}?v={stamps[name]}"></script>' for name in loaded),
    ]
    mark = "<!-- site -->"
    start = _STYLE.sub(lambda m: mark + m[0], start, count=1)
    start = _SCRIPT.sub(script, _STYLE.sub(style, _PRELOAD.sub("", start)))
    before, _, after = start.partition(mark)
    # The mark stands before the first style, and the page's own scripts and styles come after.
    start = before + "\n    " + "\n    ".join(extra) + after
    return _MODE.sub(_SYSTEM, start) + end + _SCRIPT.sub(script, rest)


def slim(app: Sphinx, exception: Exception | None) -> None:
    """Slim the pages that this build wrote."""
    if exception or app.builder.format != "html":
        return
    site = Path(app.outdir)
    paths = sorted(site.rglob("*.html"))
    # Decks, which are made of slimmed pages, have styles and scripts of their own.
    paths = [p for p in paths if not p.relative_to(site).parts[0].startswith(("_", SLIDES))]
    pages = {path: path.read_text("utf-8") for path in paths}
    if site / MODEL not in pages or finished(pages[site / MODEL]):
        return  # this build wrote no page
    import slim_css  # and what works on fonts, which no other build needs
    import slim_svg

    common = shared(site)
    tabs = any("sd-tab-set" in page for page in pages.values())
    apart = _COPY if tabs else (*_COPY, "design-tabs.js")
    copy = [name for name in common.scripts if name.endswith(_COPY)]
    made = {
        "_static/site.js": join(site, [n for n in common.scripts if not n.endswith(apart)]),
        "_static/copy.js": join(site, copy),
    }
    for name in (*common.large, "_static/maths.js"):
        made[name] = _MAP.sub("", (site / name).read_text("utf-8"))
    own = [path.read_text("utf-8") for path in sorted((site / "_static").glob("*.js"))]
    better = {path: page if finished(page) else repaired(page) for path, page in pages.items()}
    words = vocabulary(list(better.values()), [*made.values(), *own])
    styles = [name.removeprefix("_static/") for name in common.styles]
    made[DONE] = slim_css.bundle(site / "_static", styles, words) + _FAR
    for name, text in made.items():
        (site / name).write_text(text, "utf-8")
    stamps = {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in made.items()}
    plain = slim_svg.plain((site / "_static/pygments.css").read_text("utf-8"))
    for path, page in better.items():
        if finished(page):  # what it loads may have changed
            for name, stamp in stamps.items():
                page = re.sub(rf"({re.escape(name)}\?v=)\w+", rf"\g<1>{stamp}", page)
        elif "<head>" in page:
            page = slim_svg.listings(slim_svg.drawings(page), plain)
            page = head(page, common, stamps)
        if page != pages[path]:
            path.write_text(page, "utf-8")
    logger.info("slimmed: %d kB of styles", len(made[DONE]) // 1000)


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.connect("html-page-context", describe)
    app.connect("build-finished", slim, priority=900)  # on finished pages; editions come after
