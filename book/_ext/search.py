"""Search over sections rather than pages: prose only, whole words, with synonyms.

Sphinx's own search finds pages, counts their code, matches parts of words, and wants every word of
a question: it leads to the right page for 12 of the 30 questions of first-time readers in
tests/site/search_questions.yml. Here each section is an entry: its title, its page's title, its
prose. Names defined in the course's files are entries, too, and rank after sections.
`_static/sections.js` has all entries, with the synonyms and more words for sections from
book/synonyms.yml. The page search.html loads it and book/static/search.js, which finds and ranks.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from code_pages import get_source_url, iter_sources
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

INDEX_FILE = "sections.js"
SYNONYMS_FILE = Path(__file__).parents[1] / "synonyms.yml"
_PAGE = """\
<h1>Search</h1>
<noscript><p>The search is a script of this page, and the browser runs none.</p></noscript>
<form action="" method="get" role="search">
<input type="search" name="q" aria-label="Words to search for" autocomplete="off" />
<button type="submit">Search</button>
</form>
<p class="search-summary" role="status"></p>
<ol class="search" id="search-results"></ol>
<script defer src="{index}"></script>
<script defer src="{script}"></script>
"""
_NO_PROSE = nodes.literal_block | nodes.raw | nodes.comment | nodes.math_block | nodes.title


def store_sections(app: Sphinx, doctree: nodes.document) -> None:
    """Store the sections of a page that was read."""
    if not hasattr(app.env, "searched"):
        app.env.searched = {}
    app.env.searched[app.env.docname] = list(iter_sections(doctree))


def drop_sections(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    """Remove the sections of a page that is read again or was deleted."""
    getattr(env, "searched", {}).pop(docname, None)


def iter_sections(doctree: nodes.document) -> Iterator[tuple[str, str, str]]:
    """Yield (anchor, title, prose) of each section and of each glossary entry."""
    for section in doctree.findall(nodes.section):
        title = section.next_node(nodes.title)
        if title is not None:
            yield section["ids"][0], title.astext(), _extract_prose(section)
    for item in doctree.findall(nodes.definition_list_item):
        term = item.next_node(nodes.term)
        if term is not None and term["ids"]:
            yield term["ids"][0], term.astext(), _extract_prose(item)


def _extract_prose(node: nodes.Element) -> str:
    """Return the words of a section, without its subsections, code and formulas."""
    found = []
    for child in node.children:
        box = isinstance(node, nodes.Admonition) and isinstance(child, nodes.title)  # a claim
        if isinstance(child, nodes.section | nodes.term | _NO_PROSE) and not box:
            continue
        if box or isinstance(child, nodes.paragraph):
            found.append(child.astext())
        elif isinstance(child, nodes.Element) and "glossary" not in child.get("classes", []):
            found.append(_extract_prose(child))
    return " ".join(" ".join(found).split())


def iter_definitions(root: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (file, name, line) of the public functions and classes of the library."""
    for path in iter_sources(root):
        if path.startswith("code/shardlab/"):
            for node in ast.parse((root / path).read_text("utf-8")).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                    yield path, node.name, node.lineno


def search_page(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the search page, after writing its index."""
    write_index(app)
    body = _PAGE.format(index=f"_static/{INDEX_FILE}", script="_static/search.js")
    yield "search", {"title": "Search", "body": body}, "page.html"


def disable_sphinx_search(app: Sphinx) -> None:
    """Disable Sphinx's own search index."""
    if app.builder.format == "html":
        app.builder.search = False


def write_index(app: Sphinx) -> None:
    """Write the entries in the book's order: page's title, section's title, address, prose."""
    env, root = app.env, Path(app.srcdir)
    entries = [
        [env.titles[docname].astext(), title, f"{app.builder.get_target_uri(docname)}#{at}", prose]
        for docname in env.searched
        for at, title, prose in env.searched[docname]
    ]
    up = app.builder.get_target_uri
    for path, name, line in iter_definitions(root):
        where = get_source_url(app, path, f"#L{line}", lambda page, _resource=0: up(page))
        entries.append([path.removeprefix("code/"), name, where, None])
    said = yaml.safe_load(SYNONYMS_FILE.read_text("utf-8"))
    known = {address for _, _, address, _ in entries}
    for address in said["taught"]:
        if address.split(".html")[0] in env.searched and address not in known:
            place = f"{SYNONYMS_FILE.name}: taught: {address!r}"
            raise ValueError(f"{place}: must be the address of a section")
    text = json.dumps({"entries": entries, **said}, ensure_ascii=False)
    index = Path(app.outdir, "_static", INDEX_FILE)
    index.parent.mkdir(exist_ok=True)
    index.write_text(f"window.SECTIONS = {text};\n", "utf-8")
