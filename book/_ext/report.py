"""A link on each page that was executed: report a number of it, with the page and its build.

It leads to the form for a new issue of the repository that BOOK_REPOSITORY names; without one there
is no link. static/reading.js adds the section that the reader is in.
"""

from __future__ import annotations

import datetime
import subprocess
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from repository import Repository, address
from sphinx.application import Sphinx

import shardlab

_BODY = """\
Page: {page}
Build: {build}
Section:

The number on the page, and where it stands:

What it should be, and how you know:
"""


@cache
def build(root: Path) -> str:
    """The version, the commit and the day of this build, as far as they are known."""
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        commit = done.stdout.strip() if done.returncode == 0 else ""
    except OSError:
        commit = ""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return ", ".join([shardlab.__version__, *([f"commit {commit}"] if commit else []), day])


def form(repository: Repository, page: str, said: str) -> str:
    """The address of the form for a new issue, filled in."""
    names = {"title": f"A number of {page}", "body": _BODY.format(page=page, build=said)}
    if repository.url.startswith("https://gitlab."):
        names = {"issue[title]": names["title"], "issue[description]": names["body"]}
        return f"{repository.url}/-/issues/new?{urlencode(names)}"
    return f"{repository.url}/issues/new?{urlencode(names)}"


def add(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Put the link below the last section of a page that was executed."""
    repository = address()
    if repository is None or pagename not in getattr(app.env, "page_outputs", {}):
        return
    link = escape(form(repository, pagename, build(Path(app.srcdir))))
    context["body"] += (
        f'<p class="report-number"><a href="{link}">Report a number of this page</a>: '
        "the form knows the page and its build.</p>"
    )


def setup(app: Sphinx) -> None:
    """Connect the extension: after what stands around a lesson."""
    app.connect("html-page-context", add, priority=510)
