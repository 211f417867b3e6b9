"""Sphinx extension of the course: the handlers of a build's events, in the order of the events.

Jupyter Book turns lessons into pages; this extension makes the course's additions, one handler an
event. Each line of a handler is one addition, in a file whose docstring says what it does and why.
A page's HTML is parsed once, in `page`: all additions change one tree, and slides are made last.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import calculator
import cluster_site
import code_pages
import directives
import first_use
import inline_svg
import lesson_outputs
import lesson_page
import repository
import search
import site_files
import slides
from bs4 import BeautifulSoup, Tag
from bs4.dammit import EntitySubstitution
from bs4.formatter import HTMLFormatter
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment


class AsWritten(HTMLFormatter):
    """HTML formatter that keeps the order of attributes, and adds no value to empty ones."""

    def attributes(self, tag: Tag) -> list[tuple[str, str | None]]:
        """Return the attributes of an element in order; BeautifulSoup would sort them."""
        return [(name, value or None) for name, value in tag.attrs.items()]


def configured(app: Sphinx, config: Config) -> None:
    """Return the attributes of an element in their order; BeautifulSoup would sort them."""
    repository.configure(config)
    cluster_site.read(app, config)


def begun(app: Sphinx) -> None:
    """Configure the theme's repository links, and read the file of one computing centre."""
    lesson_page.note_ways(app)
    search.without_sphinxs(app)


def outdated(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Read the course's index, and disable Sphinx's own search."""
    return [
        *lesson_outputs.choose(app),
        *lesson_page.find_moved(app),
        *site_files.notice(app, removed),
    ]


def read(app: Sphinx, doctree: nodes.document) -> None:
    """Return the pages to read again, after executing all lessons without outputs."""
    search.remember(app, doctree)
    directives.join(app, doctree)
    cluster_site.make(app, doctree)


def resolved(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Finish a page that was read, before Sphinx stores it."""
    lesson_page.say_where(doctree, docname)
    first_use.link(app, doctree, docname)
    inline_svg.replace(app, doctree)
    code_pages.redirect_prose(app, doctree, docname)


def page(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Finish a page that is to be written, as a document."""
    describe(app, pagename, context, doctree)
    if doctree is None or "body" not in context:
        return
    body = BeautifulSoup(context["body"], "html.parser")
    lesson_page.frame(app, pagename, body, context)
    lesson_page.fill_table(app, pagename, body)
    lesson_page.lead_on(app, pagename, context)
    inline_svg.measure(body)
    code_pages.redirect_outputs(app, body, context["pathto"])
    directives.load(app, body)
    calculator.add_assets(app, body)
    if pagename in app.env.page_outputs:
        body.append(BeautifulSoup(repository.report(app, pagename), "html.parser"))
    context["body"] = body.decode(formatter=AsWritten(EntitySubstitution.substitute_xml, ""))
    if pagename in app.env.lesson_outputs and app.builder.name == "html":
        repository.add_launchers(app, pagename, context)
        lesson_page.write_downloads(app, pagename)
        slides.write(app, pagename, body)


def describe(app: Sphinx, pagename: str, context: dict[str, Any], doctree: Any) -> None:
    """Finish a page that is to be written, as HTML, and write its downloads and slides."""
    for script in context.get("script_files", []):
        name = getattr(script, "filename", "")
        if name and "documentation_options" not in str(name):  # scripts in the page use that one
            script.attributes.setdefault("defer", "defer")
    title = BeautifulSoup(str(context.get("title", "")), "html.parser").get_text()
    title = title or {"search": "Search", "genindex": "Index"}.get(pagename, pagename)
    limit, words = max(60, 155 - len(title)), ""
    for paragraph in doctree.findall(nodes.paragraph) if doctree is not None else ():
        if isinstance(paragraph.parent, nodes.section | nodes.list_item):
            texts = paragraph.findall(nodes.Text)
            prose = "".join(text for text in texts if not isinstance(text.parent, nodes.raw))
            words = " ".join([*words.split(), *prose.split()])
        if len(words) > limit // 2:
            break
    if len(words) > limit:
        words = words[: limit - 1].rpartition(" ")[0] + "…"
    words = f"{title}. {words}" if words else f"{title}: a page of {app.config.project}."
    said = f'\n<meta name="description" content="{escape(words)}" />'
    context["metatags"] = context.get("metatags", "") + said


def more_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the pages that have no document as their source."""
    if app.builder.name == "html":
        yield from code_pages.pages(app)
        yield from search.search_page(app)


def finished(app: Sphinx, exception: Exception | None) -> None:
    """Write the further files of a site after a successful build."""
    if exception is None and app.builder.format == "html":
        site_files.copy(app)
    if exception is None and app.builder.name == "html":
        calculator.write_bundle(app)
        code_pages.keep(app)
        site_files.write(app)
    site_files.forget(app, exception)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers, with a priority where the order relative to Sphinx's own matters."""
    app.add_config_value("cluster_file", "", "env", [str])
    app.add_directive("executions", lesson_page.Executions)
    app.add_directive("step-through", directives.StepsDirective)
    app.add_directive("predict", directives.PredictDirective)
    app.add_directive("quiz", directives.QuizDirective)
    app.add_directive("calculator", calculator.CalculatorDirective)
    app.connect("config-inited", configured, priority=900)
    app.connect("builder-inited", begun)
    app.connect("env-get-outdated", outdated)
    app.connect("env-purge-doc", search.forget)
    app.connect("doctree-read", read)
    app.connect("env-get-updated", lesson_page.as_sphinx_numbered, priority=400)
    app.connect("env-get-updated", lesson_page.by_page, priority=600)
    app.connect("doctree-resolved", resolved)
    app.connect("html-page-context", page, priority=510)
    app.connect("html-collect-pages", more_pages)
    app.connect("build-finished", finished, priority=900)
    # sphinx_exercise names singlehtml, and Sphinx would then take no other extension's visitors.
    app.registry.translation_handlers["singlehtml"] = app.registry.translation_handlers["html"]
    # Sphinx discards its environment when this number changes.
    extensions = int(site_files.digest(sorted(Path(__file__).parent.glob("*.py")))[:12], 16)
    return {"env_version": extensions}
