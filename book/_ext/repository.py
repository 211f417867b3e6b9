"""Repository and version of the course, and the links on each page that depend on them.

The repository's address comes from the environment alone, BOOK_REPOSITORY
(https://github.com/owner/name) and BOOK_BRANCH (default: main); the workflow that publishes the
site sets both. With an address, lessons have buttons that open them in Binder or Colab, and each
executed page has a link to report a wrong number: the form for a new issue, with the page and its
build filled in (static/reading.js adds the section that the reader is in).

The footer of each page shows the version of the site. The site of a release is kept in
`versions/<name>/`, and `versions.json` at the top lists all versions (.github/versions.py makes
both); static/reading.js adds a button to the footer that loads the list when it is pressed.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError

import shardlab

_ISSUE_TEMPLATE = """\
Page: {page}
Build: {build}
Section:

The number on the page, and where it stands:

What it should be, and how you know:
"""


class Repository(NamedTuple):
    """Repository that publishes the course's sources."""

    url: str
    branch: str


def get_repository() -> Repository | None:
    """Return the repository that the environment names, or None."""
    url = os.environ.get("BOOK_REPOSITORY", "").strip().rstrip("/").removesuffix(".git")
    if not url:
        return None
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+){2,}", url):
        raise ConfigError(
            f"BOOK_REPOSITORY={url!r}: must be an address like https://github.com/owner/name"
        )
    return Repository(url, os.environ.get("BOOK_BRANCH", "").strip() or "main")


def configure_theme(config: Config) -> None:
    """Configure the theme's repository links; remove Jupyter Book's example address."""
    options = config.html_theme_options
    repository = get_repository()
    options["launch_buttons"] = {}  # the theme's cannot open .md notebooks: see add_launchers
    for name in ("use_edit_page_button", "use_repository_button"):
        options[name] = repository is not None
    options["repository_url"] = repository.url if repository else ""
    options["repository_branch"] = repository.branch if repository else ""
    options["path_to_docs"] = ""
    options["extra_footer"] = f'<p class="versions">Version {shardlab.__version__}</p>'


def add_launchers(app: Sphinx, pagename: str, context: dict[str, Any]) -> None:
    """Add buttons that open a lesson in Binder or Colab to its header; they need GitHub."""
    repository = get_repository()
    github = "https://github.com/"
    if not repository or not repository.url.startswith(github):
        return
    name, topic = repository.url.removeprefix(github), pagename.removeprefix("lessons/")
    binder = f"https://mybinder.org/v2/gh/{name}/{quote(repository.branch, safe='')}"
    binder += f"?urlpath={quote(f'lab/tree/lab/{topic}.ipynb', safe='')}"
    colab = f"https://colab.research.google.com/github/{name}"
    colab += f"/blob/notebooks/{topic}.ipynb"  # Colab opens no .md
    buttons = [
        {
            "type": "link",
            "text": text,
            "tooltip": f"Open this lesson {where}",
            "icon": icon,
            "url": to,
        }
        for text, where, icon, to in (
            ("Binder", "in JupyterLab on Binder", "_static/images/logo_binder.svg", binder),
            ("Colab", "on Google Colab", "_static/images/logo_colab.png", colab),
        )
    ]
    group = {"type": "group", "tooltip": "Run this lesson", "icon": "fas fa-rocket"}
    context["header_buttons"].append({**group, "buttons": buttons, "label": "launch-buttons"})


@cache
def describe_build(root: Path) -> str:
    """Return the version, the commit and the date of this build, as far as they are known."""
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        commit = done.stdout.strip() if done.returncode == 0 else ""
    except OSError:
        commit = ""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return ", ".join([shardlab.__version__, *([f"commit {commit}"] if commit else []), day])


def make_issue_url(repository: Repository, page: str, said: str) -> str:
    """Return the address of a pre-filled form for a new issue."""
    names = {"title": f"A number of {page}", "body": _ISSUE_TEMPLATE.format(page=page, build=said)}
    if repository.url.startswith("https://gitlab."):
        names = {"issue[title]": names["title"], "issue[description]": names["body"]}
        return f"{repository.url}/-/issues/new?{urlencode(names)}"
    return f"{repository.url}/issues/new?{urlencode(names)}"


def make_report_link(app: Sphinx, pagename: str) -> str:
    """Return the link below the last section of an executed page; "" without a repository."""
    repository = get_repository()
    if repository is None:
        return ""
    link = escape(make_issue_url(repository, pagename, describe_build(Path(app.srcdir))))
    return (
        f'<p class="report-number"><a href="{link}">Report a number of this page</a>: '
        "the form knows the page and its build.</p>"
    )
