"""The landing page at the site's root as well, where otherwise a bare redirection would stand."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from finished import when_site_is_built
from sphinx.application import Sphinx

_ADDRESS = re.compile(
    r'\b(href|src|action|data-content_root)="(?![a-z][a-z0-9+.-]*:|[/#"])([^"]+)"'
)


def moved(text: str, folder: str) -> str:
    """The page `text` of a folder below the root ("book"), so that it can stand in the root."""

    def address(match: re.Match[str]) -> str:
        end = "/" if match[2].endswith("/") else ""
        return f'{match[1]}="{posixpath.normpath(posixpath.join(folder, match[2]))}{end}"'

    return _ADDRESS.sub(address, text)


def write(app: Sphinx) -> None:
    """Write index.html, a copy of the page that the table of contents has as its root."""
    page = Path(app.outdir, f"{app.config.root_doc}.html")
    text = moved(page.read_text("utf-8"), posixpath.dirname(app.config.root_doc))
    Path(app.outdir, "index.html").write_text(text, "utf-8")


def setup(app: Sphinx) -> None:
    """Connect the extension after all that changes the page."""
    when_site_is_built(app, write, priority=920)
