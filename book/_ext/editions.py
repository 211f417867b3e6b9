"""The course on one page, as an archive to read without a network, and as a PDF.

The one page is written after all others, and made of them; the archive holds the finished site. The
PDF is printed by a browser, which takes a minute, and only when the environment says PDF=1, as
`make pdf` does. The landing page lists them in a `<ul class="editions">`; no page leads to one that
is not there.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from everything import Chapter, body
from slim import MODEL
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

NAME = "one-model-many-gpus"
PAGE = "everything"
ARCHIVE = f"downloads/{NAME}.zip"
PDF = f"downloads/{NAME}.pdf"
_LISTED = re.compile(r'<ul class="editions">.*?</ul>', re.DOTALL)
_LISTED_PDF = re.compile(rf'<li><a href="[^"]*{re.escape(PDF)}.*?</li>\s*', re.DOTALL)


class PrintingFailed(SphinxError):
    """There is no PDF, though one was asked for."""

    category = "Printing failed"


def printing() -> bool:
    """Whether this build makes the PDF."""
    return os.environ.get("PDF") == "1"


# --- The list of editions ---------------------------------------------------------------------


def adapt(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Take from the list the PDF that is not made; give the one page its style."""
    if pagename == PAGE:
        app.add_css_file("editions.css")
    if not printing() and "body" in context:
        context["body"] = _LISTED_PDF.sub("", context["body"])


# --- One page ---------------------------------------------------------------------------------


def chapters(app: Sphinx) -> list[Chapter]:
    """All pages of the table of contents, in its order, as they were written."""

    def page(docname: str, part: str) -> Chapter:
        text = Path(app.outdir, f"{docname}.html").read_text("utf-8")
        return Chapter(docname, part, _LISTED.sub("", text))

    site = app.config.external_site_map
    found = [page(site.root.docname, "")]
    for tree in site.root.subtrees:
        names = (name for name in tree.files() if name in app.env.found_docs)
        found += [page(name, tree.caption or "") for name in names]
    return found


def one_page(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The one page, made of the others: all of them are written by now."""
    text = f'<div class="edition">{body(chapters(app))}</div>'
    yield PAGE, {"title": app.config.project, "body": text}, "page.html"


# --- The archive ------------------------------------------------------------------------------


def archive(site: Path) -> bytes:
    """The folder `site` as a zip file that depends on nothing but what the folder holds.

    In the archive no page leads to what the archive does not hold, itself.
    """
    data = BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for path in sorted(path for path in site.rglob("*") if path.is_file()):
            name = path.relative_to(site).as_posix()
            if name in (ARCHIVE, PDF) or name.startswith("."):
                continue
            content = path.read_bytes()
            if name.endswith(".html") and b'<ul class="editions">' in content:
                content = _LISTED.sub(_without_files, content.decode()).encode()
            member = zipfile.ZipInfo(f"{NAME}/{name}")  # of 1980, whenever the build ran
            member.create_system, member.external_attr = 3, 0o100644 << 16
            file.writestr(member, content, zipfile.ZIP_DEFLATED, compresslevel=6)
    return data.getvalue()


def _without_files(listed: re.Match[str]) -> str:
    return re.sub(r"<li><a [^>]*\sdownload>.*?</li>", "", listed[0], flags=re.DOTALL)


# --- At the build's end -----------------------------------------------------------------------


def make(app: Sphinx, exception: Exception | None) -> None:
    """Make the editions, when the pages are finished."""
    if exception or app.builder.format != "html":
        return
    site = Path(app.outdir)
    pdf, packed = site / PDF, site / ARCHIVE
    packed.parent.mkdir(exist_ok=True)
    if not printing():
        pdf.unlink(missing_ok=True)
    else:
        import pdf as printer  # and a browser, which no other build needs

        try:
            printer.write(site / f"{PAGE}.html", pdf)
        except printer.NoBrowser as error:
            raise PrintingFailed(str(error)) from None
    if not packed.is_file() or packed.stat().st_mtime_ns < (site / MODEL).stat().st_mtime_ns:
        packed.write_bytes(archive(site))


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.add_config_value("printing", printing(), "html")  # when it changes, pages are written anew
    app.connect("html-page-context", adapt)
    app.connect("html-collect-pages", one_page)
    app.connect("build-finished", make, priority=950)  # after all who change finished pages
