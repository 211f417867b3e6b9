"""Which version of the site this is, in the foot of each page, and a way to the others.

The site of a release is kept in `versions/<name>/` of the published site, and `versions.json` at
its top lists them all: .github/versions.py makes both. static/reading.js puts a button beside the
line, and a page asks for that list when its reader presses it, and then alone. From a folder on a
disk there is nobody to ask: the line says which version this is.
"""

from __future__ import annotations

import json
from pathlib import Path

from finished import when_site_is_built
from sphinx.application import Sphinx
from sphinx.config import Config

import shardlab

LIST = "versions.json"


def configure(app: Sphinx, config: Config) -> None:
    """Give the foot of each page its line."""
    line = f'<p class="versions">Version {shardlab.__version__}</p>'
    config.html_theme_options["extra_footer"] = line


def write(app: Sphinx) -> None:
    """List this version alone: nothing is known yet of others."""
    text = json.dumps([{"name": shardlab.__version__, "path": ""}])
    Path(app.outdir, LIST).write_text(text + "\n", "utf-8")


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.connect("config-inited", configure, priority=900)
    when_site_is_built(app, write, priority=900)
