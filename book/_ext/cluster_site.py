"""Pages for one computing centre: `cluster_file` in _config.yml is the path of its cluster.yml.

The batch files on pages, those that pages offer for download, and shell commands are then adapted
to the centre, with its account, its partition and its container. Without `cluster_file` nothing
changes. `shardtools.cluster.site` does the adaptation.
"""

from __future__ import annotations

import base64
import contextlib
import io
import re
import tempfile
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError

from shardlab.common import show
from shardtools.cluster import site

_SAVED = re.compile(r'href="data:text/plain;base64,([^"]+)" download="([^"]+\.sbatch)"')
_SHELL = "bash", "sh", "shell", "console"


def read_cluster_file(app: Sphinx, config: Config) -> None:
    """Read the file `cluster_file`; stop the build if it is invalid."""
    app.cluster = None
    if config.cluster_file:
        try:
            app.cluster = site.read_site(Path(app.srcdir, config.cluster_file), "cluster_file")
        except ValueError as error:
            raise ConfigError(str(error)) from None


def adapt_page(app: Sphinx, doctree: nodes.document) -> None:
    """Adapt the batch files and the commands of a page to the centre."""
    cluster, changed = app.cluster, False
    if cluster is None:
        return
    for block in doctree.findall(nodes.literal_block):
        text = adapt_code(cluster, block.astext(), block.get("language", ""))
        if text != block.astext():
            block.replace_self(nodes.literal_block(text, text, **block.attributes))
            changed = True
    for raw in doctree.findall(nodes.raw):
        if found := _SAVED.search(raw.astext()):
            text = base64.b64decode(found[1]).decode()
            text = cluster.adapt_batch_file(text, use_launcher=False)
            page = render_batch_file(text, found[2], cluster.name)
            raw.replace_self(nodes.raw(page, page, **raw.attributes))
            changed = True
    if changed:
        app.env.note_dependency(str(Path(app.srcdir, app.config.cluster_file)))


def adapt_code(cluster: site.Site, text: str, language: str) -> str:
    """Return a code block of a page, adapted to the centre."""
    if "#SBATCH" in text:
        return cluster.adapt_batch_file(text, use_launcher=False)
    if language not in _SHELL:
        return text
    return "\n".join(cluster.adapt_command(line) for line in text.split("\n"))


def render_batch_file(text: str, name: str, centre: str) -> str:
    """Return a batch file as HTML with a download link, labelled with the name of the centre."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_text(text, "utf-8")
        with contextlib.redirect_stdout(io.StringIO()):  # discards the line that scripts print
            page = show.file(path, "bash").html
    return page.replace(f">{name}</p>", f">{name}, for {centre}</p>", 1) if centre else page
