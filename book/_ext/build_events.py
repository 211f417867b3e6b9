"""Sphinx extension of the course: the handlers of a build's events, in the order of the events.

Jupyter Book turns lessons into pages; this extension makes the course's additions, one handler an
event. Each line of a handler is one addition, in a file whose docstring says what it does and why.
A page's HTML is parsed once, in `on_page_context`: all additions change one tree, slides last.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from html import escape, unescape
from pathlib import Path
from typing import Any

# For `jupyter-book build .` in an environment in which the course itself is not installed.
sys.path.append(str(Path(__file__).resolve().parents[2] / "code"))

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
from bs4 import BeautifulSoup, NavigableString, Tag
from bs4.dammit import EntitySubstitution
from bs4.formatter import HTMLFormatter
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

from shardcourse.build import facts

_CODE = re.compile(r"<pre>((?:[^<]++|</?span\b)*+)</pre>")


class SourceOrderFormatter(HTMLFormatter):
    """HTML formatter that keeps the order of attributes, and adds no value to empty ones."""

    def attributes(self, tag: Tag) -> list[tuple[str, str | None]]:
        """Return the attributes of an element in order; BeautifulSoup would sort them."""
        return [(name, value or None) for name, value in tag.attrs.items()]


def on_config_inited(app: Sphinx, config: Config) -> None:
    """Configure the theme, and read the file of one computing centre."""
    repository.configure_theme(config)
    lesson_outputs.announce_others(config)
    cluster_site.read_cluster_file(app, config)


def on_builder_inited(app: Sphinx) -> None:
    """Read the course's index, and disable Sphinx's own search."""
    lesson_page.read_course_index(app)
    code_pages.read_hashes(app)
    search.disable_sphinx_search(app)


def on_env_get_outdated(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Return the pages to read again, after executing all lessons without outputs."""
    return [
        *lesson_outputs.choose_outputs(app),
        *lesson_page.find_changed_pages(app),
        *site_files.find_changed_files(app, removed),
    ]


def on_doctree_read(app: Sphinx, doctree: nodes.document) -> None:
    """Finish a page that was read, before Sphinx stores it."""
    search.store_sections(app, doctree)
    directives.attach_answers(app, doctree)
    directives.mark_verdicts(app, doctree)
    cluster_site.adapt_page(app, doctree)


def on_doctree_resolved(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Finish a page that is to be written, as a document."""
    lesson_page.add_answer_hint(doctree, docname)
    first_use.link_first_uses(app, doctree, docname)
    inline_svg.embed_pictures(app, doctree)
    code_pages.redirect_prose(app, doctree, docname)


def on_page_context(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Finish a page that is to be written, as HTML, and write its downloads and slides."""
    add_description(app, pagename, context, doctree)
    if doctree is None or "body" not in context:
        return
    body = parse_body(context["body"])
    lesson_page.add_page_notes(app, pagename, body, context)
    lesson_page.fill_table(app, pagename, body)
    lesson_page.skip_extra_pages(app, pagename, context)
    lesson_page.format_exercise_titles(body)
    lesson_page.keep_values_whole(body)
    inline_svg.set_output_widths(body)
    if app.builder.name != "html" or pagename != app.config.root_doc:
        inline_svg.add_captions(body)
    code_pages.redirect_outputs(app, body, context["pathto"])
    directives.add_assets(app, body)
    calculator.add_assets(app, body)
    if pagename in app.env.page_outputs:
        body.append(BeautifulSoup(repository.make_report_link(app, pagename), "html.parser"))
    formatter = SourceOrderFormatter(EntitySubstitution.substitute_xml, "")
    context["body"] = body.decode(formatter=formatter)
    if pagename in app.env.lesson_outputs and app.builder.name == "html":
        repository.add_launchers(app, pagename, context)
        write_beside(app, partial(write_lesson_files, app, pagename, body))


def write_lesson_files(app: Sphinx, pagename: str, body: BeautifulSoup) -> None:
    """Write a lesson's downloads, and its slides, which consume `body`."""
    lesson_page.write_downloads(app, pagename)
    slides.write_slides(app, pagename, body)


def write_beside(app: Sphinx, write: Callable[[], None]) -> None:
    """Call `write`, which only writes files, in a fork, while this process goes on."""
    finish_writing(app)
    if sys.platform == "linux" and facts.count_cores() > 1:
        app.writer = multiprocessing.get_context("fork").Process(target=write)
        app.writer.start()
    else:
        write()


def finish_writing(app: Sphinx) -> None:
    """Wait for the end of `write_beside`; raise ExtensionError if it failed."""
    if writer := getattr(app, "writer", None):
        app.writer = None
        writer.join()
        if writer.exitcode:
            raise ExtensionError("files of the site could not be written: see above")


def parse_body(html: str) -> BeautifulSoup:
    """Return a page's body as a tree in which the code that Pygments has marked up is one string.

    Four of five elements of the course's pages are Pygments' spans, and no addition needs them.
    """
    marked_up: list[str] = []

    def take_out(found: re.Match) -> str:
        marked_up.append(found[1])
        return f'<pre data-number="{len(marked_up) - 1}"></pre>'

    body = BeautifulSoup(_CODE.sub(take_out, html), "html.parser")
    for pre in body.find_all("pre", attrs={"data-number": True}):
        code = marked_up[int(pre.attrs.pop("data-number"))]
        text = NavigableString(unescape(re.sub(r"<[^>]+>", "", code)))
        text.output_ready = lambda *_, code=code: code
        pre.append(text)
    return body


def add_description(app: Sphinx, pagename: str, context: dict[str, Any], doctree: Any) -> None:
    """Add the page's description for search engines, and defer its scripts."""
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
    tag = f'\n<meta name="description" content="{escape(words)}" />'
    context["metatags"] = context.get("metatags", "") + tag


def on_collect_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the pages that have no document as their source."""
    if app.builder.name == "html":
        yield from search.search_page(app)
        changed = code_pages.find_changed(app)  # last: all links to them are known
        write_beside(app, partial(code_pages.write_pages, app, changed[::2]))
        yield from (code_pages.make_page(app, path) for path in changed[1::2])


def on_build_finished(app: Sphinx, exception: Exception | None) -> None:
    """Write the further files of a site after a successful build."""
    finish_writing(app)
    if exception is None and app.builder.format == "html":
        site_files.copy_libraries(app)
    if exception is None and app.builder.name == "html":
        calculator.write_bundle(app)
        code_pages.store_hashes(app)
        site_files.write_root_files(app)
    site_files.discard_failed_build(app, exception)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers, with a priority where the order relative to Sphinx's own matters."""
    app.add_config_value("cluster_file", "", "env", [str])
    app.add_directive("executions", lesson_page.Executions)
    app.add_directive("step-through", directives.StepsDirective)
    app.add_directive("predict", directives.PredictDirective)
    app.add_directive("quiz", directives.QuizDirective)
    app.add_directive("calculator", calculator.CalculatorDirective)
    app.connect("config-inited", on_config_inited, priority=900)
    app.connect("builder-inited", on_builder_inited)
    app.connect("env-get-outdated", on_env_get_outdated)
    app.connect("env-purge-doc", search.drop_sections)
    app.connect("doctree-read", on_doctree_read)
    app.connect("env-get-updated", slides.read_mistakes)
    app.connect("env-get-updated", lesson_page.restore_sphinx_numbers, priority=400)
    app.connect("env-get-updated", lesson_page.number_by_page, priority=600)
    app.connect("doctree-resolved", on_doctree_resolved)
    app.connect("html-page-context", on_page_context, priority=510)
    app.connect("html-collect-pages", on_collect_pages)
    app.connect("build-finished", on_build_finished, priority=900)
    # sphinx_exercise names singlehtml, and Sphinx would then take no other extension's visitors.
    app.registry.translation_handlers["singlehtml"] = app.registry.translation_handlers["html"]
    # Sphinx discards its environment when this number changes.
    extensions = int(site_files.hash_files(sorted(Path(__file__).parent.glob("*.py")))[:12], 16)
    return {"env_version": extensions}
