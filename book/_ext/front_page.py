"""The landing page at the site's root as well, where otherwise a bare redirection would stand."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

_ADDRESS = re.compile(r'\b(href|src|action|data-content_root)="([^"#][^"]*)"')


def moved(text: str, folder: str) -> str:
    """The page `text` of a folder below the root ("book"), so that it can stand in the root."""

    def address(match: re.Match[str]) -> str:
        name, value = match.groups()
        if re.match(r"[a-z][a-z0-9+.-]*:|/", value):  # another host's, or "data:", or from the root
            return match[0]
        end = "/" if value.endswith("/") else ""
        return f'{name}="{posixpath.normpath(posixpath.join(folder, value))}{end}"'

    return _ADDRESS.sub(address, text)


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write index.html, a copy of the page that the table of contents has as its root."""
    if exception or app.builder.format != "html" or "/" not in app.config.root_doc:
        return
    page = Path(app.outdir, f"{app.config.root_doc}.html")
    folder = posixpath.dirname(app.config.root_doc)
    front, text = Path(app.outdir, "index.html"), moved(page.read_text("utf-8"), folder)
    if not front.is_file() or front.read_text("utf-8") != text:
        front.write_text(text, "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the extension: after all that changes the page, before all that copies the site."""
    app.connect("build-finished", write, priority=920)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
