"""The repository's address, and the buttons that need one.

The address comes from the environment alone, BOOK_REPOSITORY (https://github.com/owner/name) and
BOOK_BRANCH (main unless said otherwise): the workflow that publishes the site sets them. A build
that knows no address offers no such button.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple
from urllib.parse import quote

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError


class Repository(NamedTuple):
    """Where the course's sources are published."""

    url: str
    branch: str

    @property
    def github(self) -> str:
        """ "owner/name" on GitHub, "" elsewhere."""
        match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)", self.url)
        return match[1] if match else ""


def address() -> Repository | None:
    """The repository that the environment names, if it does."""
    url = os.environ.get("BOOK_REPOSITORY", "").strip().rstrip("/").removesuffix(".git")
    if not url:
        return None
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+){2,}", url):
        raise ConfigError(
            f"BOOK_REPOSITORY={url!r}: allowed is an address like https://github.com/owner/name"
        )
    return Repository(url, os.environ.get("BOOK_BRANCH", "").strip() or "main")


def configure(app: Sphinx, config: Config) -> None:
    """Tell the theme; take away the example address that Jupyter Book brings."""
    options = config.html_theme_options
    repository = address()
    options["launch_buttons"] = {}  # the theme's own know no .md notebooks: see add_launchers
    for name in ("use_edit_page_button", "use_repository_button"):
        options[name] = repository is not None
    options["repository_url"] = repository.url if repository else ""
    options["repository_branch"] = repository.branch if repository else ""
    options["path_to_docs"] = ""


def launchers(repository: Repository, topic: str) -> list[dict[str, str]]:
    """The buttons that open a lesson elsewhere."""
    if not repository.github:
        return []
    binder = f"https://mybinder.org/v2/gh/{repository.github}/{quote(repository.branch, safe='')}"
    colab = f"https://colab.research.google.com/github/{repository.github}"
    return [
        {
            "type": "link",
            "text": "Binder",
            "tooltip": "Open this lesson in JupyterLab on Binder",
            "icon": "_static/images/logo_binder.svg",
            "url": f"{binder}?urlpath={quote(f'lab/tree/lab/{topic}.ipynb', safe='')}",
        },
        {
            "type": "link",
            "text": "Colab",
            "tooltip": "Open this lesson on Google Colab",
            "icon": "_static/images/logo_colab.png",
            "url": f"{colab}/blob/notebooks/{topic}.ipynb",  # Colab opens no .md
        },
    ]


def add_launchers(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Add the buttons to a lesson's header."""
    repository = address()
    if repository is None or pagename not in getattr(app.env, "lesson_outputs", {}):
        return
    buttons = launchers(repository, pagename.removeprefix("lessons/"))
    if buttons:
        context["header_buttons"].append(
            {
                "type": "group",
                "tooltip": "Run this lesson",
                "icon": "fas fa-rocket",
                "buttons": buttons,
                "label": "launch-buttons",
            }
        )


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.connect("config-inited", configure)
    app.connect("html-page-context", add_launchers, priority=502)  # after the theme's buttons
