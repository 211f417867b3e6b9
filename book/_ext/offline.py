"""Nothing from another host, and nothing that no page needs.

Jupyter Book's pages ask other hosts for thebe, which _config.yml leaves out, and for MathJax. That
comes from the Python package sphinx-mathjax-offline here; of its 24 MB a page loads some 200 kB,
and the rest goes.
"""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

_UNUSED = ("scripts/fontawesome.js*", "**/*.map")  # files in _static
_MATHJAX = (
    *("startup.js", "core.js", "input/tex.js", "output/chtml.js", "output/chtml/fonts/tex.js"),
    *("a11y/assistive-mml.js", "output/chtml/fonts/woff-v2", "input/tex/extensions"),
)
_MATHJAX_LARGE = "all-packages.js"  # the other extensions in one file: never loaded beside them


def finish(app: Sphinx, exception: Exception | None) -> None:
    """Drop the files that no page loads, and copy the part of MathJax that pages load."""
    if exception or app.builder.format != "html":
        return
    for pattern in _UNUSED:
        for path in Path(app.outdir, "_static").glob(pattern):
            path.unlink()
    goal = Path(app.outdir, "_static/mathjax")
    distribution = metadata.distribution("sphinx-mathjax-offline")
    source = Path(str(distribution.locate_file("sphinx-mathjax-offline/static/mathjax")))
    for name in _MATHJAX:
        if (source / name).is_dir():
            ignore = shutil.ignore_patterns(_MATHJAX_LARGE)
            shutil.copytree(source / name, goal / name, ignore=ignore, dirs_exist_ok=True)
        else:
            (goal / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, goal / name)


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.connect("build-finished", finish)
