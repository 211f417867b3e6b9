"""Nothing from another host, and nothing that no page needs.

Jupyter Book's pages ask other hosts for MathJax, thebe and require.js. Here MathJax comes from the
Python package sphinx-mathjax-offline, of whose 24 MB a page loads some 300 kB; the rest goes.
"""

from __future__ import annotations

import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

_UNWANTED = ("sphinx-thebe", "require.js", "html-manager")  # of the pages' scripts and styles
_ICONS = re.compile(
    r"\s*(<!-- So that users can add custom icons -->\s*)?"
    r"<script[^>]*/fontawesome\.js[^>]*></script>"
)
_UNUSED = ("scripts/fontawesome.js*", "sphinx-thebe.*", "**/*.map")  # files in _static
_MATHJAX = ("tex-chtml.js", "output/chtml/fonts/woff-v2", "input/tex/extensions")
_MATHJAX_LARGE = "all-packages.js"  # the other extensions in one file: never loaded beside them


def configure(app: Sphinx, config: Config) -> None:
    """Keep myst-nb from naming scripts on another host."""
    config.nb_ipywidgets_js = {}


def silence_thebe(app: Sphinx) -> None:
    """Take away what sphinx-thebe, which Jupyter Book always loads, would add to every page."""
    for name, listeners in app.events.listeners.items():
        app.events.listeners[name] = [
            listener
            for listener in listeners
            if getattr(listener.handler, "__module__", "") != "sphinx_thebe"
        ]


def drop_scripts(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Drop scripts that no page needs."""
    for kind in ("script_files", "css_files"):
        context[kind] = [
            file
            for file in context.get(kind, [])
            if not any(word in str(getattr(file, "filename", file)) for word in _UNWANTED)
        ]


def drop_files(app: Sphinx, exception: Exception | None) -> None:
    """Drop half a megabyte of icons as a script (the pages use the web font), and unused files."""
    if exception or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text("utf-8")
        if "/fontawesome.js" in text:  # the theme's template names it, not Sphinx's list
            page.write_text(_ICONS.sub("", text), "utf-8")
    for pattern in _UNUSED:
        for path in Path(app.outdir, "_static").glob(pattern):
            path.unlink()


def copy_mathjax(app: Sphinx, exception: Exception | None) -> None:
    """Copy the part of MathJax that pages load."""
    goal = Path(app.outdir, "_static/mathjax")
    if exception or app.builder.format != "html":
        return
    distribution = metadata.distribution("sphinx-mathjax-offline")
    source = Path(str(distribution.locate_file("sphinx-mathjax-offline/static/mathjax")))
    for name in _MATHJAX:
        if (source / name).is_dir():
            ignore = shutil.ignore_patterns(_MATHJAX_LARGE)
            shutil.copytree(source / name, goal / name, ignore=ignore, dirs_exist_ok=True)
        else:
            goal.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, goal / name)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the extension."""
    app.connect("config-inited", configure)
    app.connect("builder-inited", silence_thebe, priority=1)
    app.connect("html-page-context", drop_scripts, priority=900)
    app.connect("build-finished", drop_files)
    app.connect("build-finished", copy_mathjax)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
