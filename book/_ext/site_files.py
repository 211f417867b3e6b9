"""Files of a finished site beside its pages, and repairs of Sphinx's incremental builds.

- Nothing is loaded from another host. Jupyter Book's pages ask for thebe, which _config.yml omits,
  and for MathJax, which comes from the Python package sphinx-mathjax-offline: a page loads some
  200 kB of its 24 MB, and the rest is dropped. Slides load reveal.js, from sphinx-revealjs.
- The landing page is also written at the root, instead of a bare redirect.
- After a build that failed on a warning, the next one would skip the page, and would succeed.
- Sphinx copies a changed style sheet or source file only if a page has changed.
- Sphinx keeps pages written by an older version of these extensions, and pages of removed files.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import shutil
from importlib import metadata
from pathlib import Path

from bs4 import BeautifulSoup
from code_pages import iter_sources
from search import SYNONYMS_FILE
from sphinx.application import Sphinx

import shardlab

_UNUSED = ("scripts/fontawesome.js*", "**/*.map")  # files in _static
_MATHJAX = (
    *("startup.js", "core.js", "input/tex.js", "output/chtml.js", "output/chtml/fonts/tex.js"),
    *("a11y/assistive-mml.js", "output/chtml/fonts/woff-v2", "input/tex/extensions"),
)
_MATHJAX_LARGE = "all-packages.js"  # the other extensions in one file, not needed beside them
_REVEAL = (
    "dist/reset.css",
    "dist/reveal.css",
    "dist/reveal.js",
    "plugin/notes/notes.js",
    "LICENSE",
)


def _get_package_folder(name: str, folder: str) -> Path:
    return Path(str(metadata.distribution(name).locate_file(folder)))


def copy_libraries(app: Sphinx) -> None:
    """Copy the files of MathJax and reveal.js that pages load, and remove unused files."""
    static = Path(app.outdir, "_static")
    for pattern in _UNUSED:
        for path in static.glob(pattern):
            path.unlink()
    source = _get_package_folder("sphinx-mathjax-offline", "sphinx-mathjax-offline/static/mathjax")
    for name in _MATHJAX:
        goal = static / "mathjax" / name
        if (source / name).is_dir():
            ignore = shutil.ignore_patterns(_MATHJAX_LARGE)
            shutil.copytree(source / name, goal, ignore=ignore, dirs_exist_ok=True)
        else:
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, goal)
    (static / "reveal").mkdir(exist_ok=True)
    source = _get_package_folder("sphinx-revealjs", "sphinx_revealjs/_static/revealjs")
    for name in _REVEAL:
        shutil.copy2(source / name, static / "reveal")


def write_root_files(app: Sphinx) -> None:
    """Write the list of versions, which has only this one, and the landing page at the root."""
    listed = json.dumps([{"name": shardlab.__version__, "path": ""}])
    Path(app.outdir, "versions.json").write_text(listed + "\n", "utf-8")
    root = app.config.root_doc
    text = Path(app.outdir, f"{root}.html").read_text("utf-8")
    text = rebase_links(text, posixpath.dirname(root))
    Path(app.outdir, "index.html").write_text(text, "utf-8")


def rebase_links(text: str, folder: str) -> str:
    """Return the page `text` of a folder below the root ("book") with links from the root."""
    page = BeautifulSoup(text, "html.parser")
    for name in ("href", "src", "action", "data-content_root"):
        for one in page.select(f"[{name}]"):
            address = one[name]
            if address and not address.startswith(("/", "#")) and ":" not in address.split("/")[0]:
                end = "/" if address.endswith("/") else ""
                one[name] = posixpath.normpath(posixpath.join(folder, address)) + end
    return str(page)


def find_changed_files(app: Sphinx, removed: set[str]) -> list[str]:
    """Return the root page, so that Sphinx copies all files, if a file without a page changed."""
    for docname in removed:
        Path(app.builder.get_outfilename(docname)).unlink(missing_ok=True)
    root = Path(app.srcdir)
    static = sorted(path for path in (root / "book/static").rglob("*") if path.is_file())
    now = hash_files([*(root / path for path in iter_sources(root)), *static, SYNONYMS_FILE])
    before = getattr(app.env, "other_files", now)
    app.env.other_files = now
    return [app.config.root_doc] if now != before else []


def hash_files(files: list[Path]) -> str:
    """Return a hash of files and their names."""
    return hashlib.sha256(b"".join(str(f).encode() + f.read_bytes() for f in files)).hexdigest()


def discard_failed_build(app: Sphinx, exception: Exception | None) -> None:
    """Let the next build read all pages after a build with an error or with fatal warnings."""
    strict = app.warningiserror or app.keep_going  # `-W --keep-going` sets only the latter
    if exception or (strict and app._warncount):
        Path(app.doctreedir, "environment.pickle").unlink(missing_ok=True)
