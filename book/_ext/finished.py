"""Connect what writes into the finished site."""

from __future__ import annotations

from collections.abc import Callable

from sphinx.application import Sphinx


def when_site_is_built(app: Sphinx, write: Callable[[Sphinx], None], priority: int = 500) -> None:
    """Call `write` at the end of a build that went well, but not of the one-page build."""

    def finish(app: Sphinx, exception: Exception | None) -> None:
        if exception is None and app.builder.name == "html":
            write(app)

    app.connect("build-finished", finish, priority=priority)
