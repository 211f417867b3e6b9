"""Pages of the course's own source files with line numbers, and the links to these pages.

`shardlab.common.show` and the lessons' prose link to ../code/shardlab/<file>.py#L30, which is the
file in a checkout. In the site such a link leads to the repository if its address is known, or
else to a page made here, of a file that some page links to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from repository import get_repository
from sphinx import addnodes
from sphinx.application import Sphinx

from shardlab.common import PACKAGES

FOLDERS = (*(f"code/{name}" for name in PACKAGES), "code/lessons", "figures", "benchmarks", "tests")
_FILE = rf"((?:{'|'.join(FOLDERS)})/[\w/]+\.py)"
_HASHES_FILE = "code_pages.json"  # by linked file: the hash of its page's inputs
_LINK = re.compile(rf"(?:\.\./)+{_FILE}(#L\d+(?:-L?\d+)?)?")


def iter_sources(root: Path) -> Iterator[str]:
    """Yield the paths, relative to the root, of all files that can get a page."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix()


def read_hashes(app: Sphinx) -> None:
    """Read which files have a page, and the hash of each page's inputs: into `app.code_pages`."""
    kept = Path(app.doctreedir, _HASHES_FILE)
    app.code_pages = json.loads(kept.read_text("utf-8")) if kept.is_file() else {}


def get_source_url(app: Sphinx, path: str, lines: str, pathto: Any) -> str:
    """Return the target of a page's link to `lines` ("#L30" or "") of the file `path`."""
    repository = get_repository()
    if repository:
        return f"{repository.url}/blob/{repository.branch}/{path}{lines}"
    app.code_pages.setdefault(path, "")
    return pathto(path.removesuffix(".py")) + lines.partition("-")[0]


def find_changed(app: Sphinx) -> list[str]:
    """Return the files whose pages have to be written, since an input has changed."""
    titles = sorted((name, title.astext()) for name, title in app.env.titles.items())
    contents = sorted(app.env.toctree_includes.items())
    around = repr((app.builder.build_info.config_hash, titles, contents))
    changed = []
    for path, before in sorted(app.code_pages.items()):
        if not Path(app.srcdir, path).is_file():
            del app.code_pages[path]
            continue
        code = Path(app.srcdir, path).read_text("utf-8")
        stamp = app.code_pages[path] = hashlib.sha256((around + code).encode()).hexdigest()
        there = Path(app.builder.get_outfilename(path.removesuffix(".py"))).is_file()
        if not there or before != stamp:
            changed.append(path)
    return changed


def make_page(app: Sphinx, path: str) -> tuple[str, dict[str, Any], str]:
    """Return name, context and template of the page of the file `path`."""
    code = Path(app.srcdir, path).read_text("utf-8")
    formatter = HtmlFormatter(linenos="table", linespans="L")
    body = highlight(code, PythonLexer(stripnl=False), formatter)
    body = body.replace('<span id="L-', '<span id="L')
    body = re.sub(r'<span class="normal">( *)(\d+)</span>', r'\1<a href="#L\2">\2</a>', body)
    title = f"<h1>{escape(path)}</h1>"
    context = {"title": path, "body": f'<article class="code-page">{title}{body}</article>'}
    return path.removesuffix(".py"), context, "page.html"


def write_pages(app: Sphinx, paths: list[str]) -> None:
    """Write the pages of the files `paths`."""
    for path in paths:
        app.builder.handle_page(*make_page(app, path))


def store_hashes(app: Sphinx) -> None:
    """Store the hashes of the pages' inputs after a successful build."""
    Path(app.doctreedir, _HASHES_FILE).write_text(json.dumps(app.code_pages), "utf-8")


def redirect_outputs(app: Sphinx, body: BeautifulSoup, pathto: Any) -> None:
    """Redirect the links in cells' outputs to the pages."""
    for link in body.select('a[href^="../"]'):
        found = _LINK.fullmatch(link["href"])
        if found and Path(app.srcdir, found[1]).is_file():
            link["href"] = get_source_url(app, found[1], found[2] or "", pathto)


def redirect_prose(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Redirect the links in prose, which MyST takes for downloads, to the pages.

    The role {download} stays a download.
    """
    for link in list(doctree.findall(addnodes.download_reference)):
        if link.get("reftype") == "download":
            continue
        source = os.path.normpath(Path(docname).parent / link["reftarget"]).replace(os.sep, "/")
        if re.fullmatch(_FILE, source) and Path(app.srcdir, source).is_file():
            pathto = partial(app.builder.get_relative_uri, docname)
            uri = get_source_url(app, source, "", pathto)
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri))
