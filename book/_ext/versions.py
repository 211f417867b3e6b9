"""Which version of the site this is, in the foot of each page, and a way to the others.

The site of a release is kept in `versions/<name>/` of the published site, and `versions.json` at
its top lists them all: .github/versions.py makes both. A page asks for that list when its reader
opens the line, and then alone; from a folder on a disk there is nobody to ask, and the line says
which version this is.
"""

from __future__ import annotations

import json
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config

import shardlab

LIST = "versions.json"


def configure(app: Sphinx, config: Config) -> None:
    """Give the foot of each page its line."""
    name = shardlab.__version__
    config.html_theme_options["extra_footer"] = (
        f'<details class="versions" data-version="{name}"><summary>Version {name}</summary>'
        "<p>This is the only version here.</p></details>"
    )


def write(app: Sphinx, exception: Exception | None) -> None:
    """List this version alone: nothing is known yet of others."""
    if not exception and app.builder.format == "html":
        text = json.dumps([{"name": shardlab.__version__, "path": ""}])
        Path(app.outdir, LIST).write_text(text + "\n", "utf-8")


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.connect("config-inited", configure, priority=900)
    app.connect("build-finished", write, priority=900)
