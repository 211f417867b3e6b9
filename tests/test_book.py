"""The site: nothing from another host, no dead link, and every lesson has its additions.

tests/site/test_site_pages.py tests the pages in a browser.
"""

from __future__ import annotations

import os
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from docutils import core, nodes
from throwaway import Book

from shardcourse import build
from shardcourse.build import index

LOADED = {  # loaded by a browser without a click
    "script": ("src",),
    "img": ("src", "srcset"),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "object": ("data",),
    "embed": ("src",),
    "track": ("src",),
}
FOREIGN = re.compile(r"^\s*(https?:)?//", re.IGNORECASE)
SOURCE = re.compile(r'<table class="highlighttable">.*?</table>', re.DOTALL)  # a page of code
CSS_LOADS = re.compile(
    r"(?:@import\s*|url\(\s*)(?:url\(\s*)?[\"']?((?:https?:)?//[^\"')\s]+)", re.I
)


class Page(HTMLParser):
    """The parts of an HTML page that the tests look at."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.ids = set(re.findall(r'id="(L\d+)"', text))  # a line of code
        self.links: list[str] = []
        self.foreign: list[str] = []
        self._inside = ""
        self.feed(SOURCE.sub("", text))

    def handle_starttag(self, tag, attrs):
        """Collect ids, links and loaded files."""
        values = {name: value or "" for name, value in attrs}
        self._inside = tag
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        loads = [values.get(name, "") for name in LOADED.get(tag, ())]
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev", "author"):
            loads.append(values.get("href", ""))
        self.foreign += [f"<{tag}> {address}" for address in loads if FOREIGN.search(address)]
        self.foreign += CSS_LOADS.findall(values.get("style", ""))

    def handle_data(self, data):
        """Look for addresses in scripts and styles within the page."""
        if self._inside == "style":
            self.foreign += CSS_LOADS.findall(data)
        elif self._inside == "script":
            self.foreign += re.findall(r"https?://[^\"'\s]+", data)

    def handle_endtag(self, tag):
        """Leave scripts and styles."""
        self._inside = ""


@cache
def _parse_cached(path: Path, _changed: int) -> Page:
    return Page(path.read_text("utf-8"))


def parse_page(path: Path) -> Page:
    return _parse_cached(path, path.stat().st_mtime_ns)


def find_foreign_loads(site: Path) -> list[str]:
    """Return every load from another host in the pages and style sheets of `site`."""
    found = []
    for path in [*site.rglob("*.html"), *site.rglob("*.svg")]:
        found += [f"{path.relative_to(site)}: {x}" for x in parse_page(path).foreign]
    for path in site.rglob("*.css"):
        text = re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL)
        found += [f"{path.relative_to(site)}: {x}" for x in CSS_LOADS.findall(text)]
    return found


def dead_links(site: Path) -> list[str]:
    """Return every link within `site` to a missing file or anchor."""
    pages = {str(path): parse_page(path) for path in site.rglob("*.html")}
    files = {str(path) for path in site.rglob("*") if path.is_file()}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link in ("", "#"):
                continue
            place = os.path.join(os.path.dirname(path), unquote(parts.path))
            target = os.path.normpath(place) if parts.path else path
            anchor = unquote(parts.fragment)
            if target not in files or (
                anchor and target in pages and anchor not in pages[target].ids
            ):
                dead.append(f"{os.path.relpath(path, site)}: {link}")
    return dead


# --- The course's own site --------------------------------------------------------------------


def test_site_asks_no_other_host(site):
    assert find_foreign_loads(site) == []


def test_links_and_anchors_lead_somewhere(site):
    assert dead_links(site) == []


def test_lesson_says_where_its_outputs_come_from_and_offers_three_files(site, root):
    table = (site / "book/execution.html").read_text("utf-8")
    for topic in build.list_lessons(root):
        text = (site / f"lessons/{topic}.html").read_text("utf-8")
        assert '</h1><p class="lesson-head">' in text, f"{topic}: nothing under the title"
        note = re.search(r'<p class="lesson-outputs".*?</p>', text, re.DOTALL)
        assert note, f"{topic}: nothing at the end"
        assert re.search(
            r"(Recorded|Executed by this build) on .*torch \d.*\d{4}-\d\d-\d\d, \d+ s", note[0]
        )
        assert f'href="../lessons/{topic}.html"' in table
        for suffix in (".md", ".ipynb", ".py"):
            assert f'href="../downloads/{topic}{suffix}"' in note[0]
            assert (site / f"downloads/{topic}{suffix}").stat().st_size > 0
        script = (site / f"downloads/{topic}.py").read_text("utf-8")
        assert f"# *As a script: `python {topic}.py`" in script
        notebook = nbformat.read(site / f"downloads/{topic}.ipynb", as_version=4)
        nbformat.validate(notebook)
        assert any(cell.get("outputs") for cell in notebook.cells)
        assert any(cell.cell_type == "markdown" for cell in notebook.cells)


def test_what_can_wait_is_named_at_the_head_and_at_each_section(site, root):
    for topic in index.read_index(root).topics.values():
        text = (site / f"lessons/{topic.topic}.html").read_text("utf-8")
        assert text.count('<p class="can-wait">') == len(topic.later), topic.topic
        assert ("can wait for a second reading" in text) == bool(topic.later), topic.topic


def test_outputs_hold_no_warning_and_no_path_of_this_machine(site, root):
    """A rank's warnings come with its prints, so the build itself lets them pass."""
    # Python says "UserWarning: ", torch in C++ "] Warning: "; a command of ours says "Warning: ".
    unwanted = re.compile(rf"(?:\w|\] )Warning: |site-packages|{re.escape(str(root))}")
    for topic in build.list_lessons(root):
        notebook = nbformat.read(site / f"downloads/{topic}.ipynb", as_version=4)
        outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
        texts = [o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs]
        assert [text for text in texts if unwanted.search(text)] == [], topic
        assert [o for o in outputs if o.get("name") == "stderr"] == [], topic


def test_site_holds_no_example_address_and_no_dead_weight(site):
    pages = [*site.glob("*.html"), *site.glob("book/*.html"), *site.glob("lessons/*.html")]
    for path in pages:  # without pages of source files: this test's own is among them
        text = path.read_text("utf-8")
        assert "executablebooks/jupyter-book" not in text
        assert "fontawesome.js" not in text
        assert "sphinx-thebe" not in text
        assert "THEBE" not in text
    assert not (site / "_static/scripts/fontawesome.js").exists()
    # MathJax as it is distributed takes 24 MB.
    mathjax = sum(p.stat().st_size for p in (site / "_static/mathjax").rglob("*") if p.is_file())
    assert 1e6 < mathjax < 2.5e6


# --- A small book -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_book(tmp_path_factory):
    """Return the small book, built without and then with a repository's address."""
    book = Book(tmp_path_factory.mktemp("book"))
    source = (
        "from IPython.display import HTML\nHTML('<a href=\"../code/shardlab/first.py#L4\">x</a>')"
    )
    book.edit("lessons/small.md", "from shardlab.first", f"{source};\nfrom shardlab.first")
    book.edit(
        "lessons/small.md",
        "from shardlab.first import answer\n```",
        f"from shardlab.first import answer\n```\n\n```{{code-cell}} ipython3\n{source}\n```",
    )
    book.build_checked()
    return book


def test_small_book_is_sound(small_book):
    assert find_foreign_loads(small_book.root / "_build/html") == []
    assert dead_links(small_book.root / "_build/html") == []


def test_unchanged_sources_need_no_build(small_book):
    assert "Nothing has changed" in small_book.build_checked().log
    assert "Nothing has changed" not in small_book.build_checked(BOOK_BRANCH="other").log


def test_first_lesson_is_there_before_the_others(tmp_path):
    book, first = Book(tmp_path), "lessons/model_parallelism"
    book.write(f"{first}.md", (tmp_path / "lessons/small.md").read_text("utf-8"))
    book.edit("lessons/small.md", "answer())", "answer(), 1 / 0)")
    book.edit("_toc.yml", "lessons/small", f"{first}\n  - file: lessons/small")
    for name in ("glossary", "references"):
        book.write(f"book/{name}.md", "# Words\n")
    assert book.build() != 0 and "1 / 0" in book.log
    assert f"The first lesson is there: _build/html/{first}.html" in book.log
    assert "the answer is 42" in (page := book.read_page(first))
    assert "The other lessons are being executed" in page


def test_pictures_stand_in_the_page(small_book):
    page = small_book.read_page()
    assert '<svg xmlns="http://www.w3.org/2000/svg" viewbox="0 0 4 2" role="img" ' in page
    assert 'aria-label="Two boxes"' in page
    assert '<g id="svg0-box">' in page
    assert '<use href="#svg0-box"></use>' in page
    assert "currentColor" in page


def test_links_to_code_lead_to_its_page(small_book):
    assert 'href="../code/shardlab/first.html#L4"' in small_book.read_page()  # from an output
    assert re.search(r'href="\.\./_downloads/\w+/first\.py"', small_book.read_page())
    assert re.search(
        r'href="\.\./code/shardlab/first\.html"[^>]*><span[^>]*>the code', small_book.read_page()
    )
    assert '<span id="L4">' in small_book.read_page("code/shardlab/first")


def test_buttons_need_a_repository(small_book):
    words = ("mybinder.org", "colab.research.google.com", "Suggest edit", "/edit/main/")
    words += ("Report a number",)
    assert not any(word in small_book.read_page() for word in words)
    with_address = Book.__new__(Book)
    with_address.root, with_address.log = small_book.root, ""
    address = "https://github.com/some-owner/some-name"
    with_address.build_checked(BOOK_REPOSITORY=address, BOOK_BRANCH="trunk")
    assert with_address.executed_lessons == []
    page = with_address.read_page()
    assert f"{address}/edit/trunk/lessons/small.md" in page
    assert f"{address}/issues/new?title=A+number+of+lessons%2Fsmall&amp;body=Page" in page
    assert "mybinder.org/v2/gh/some-owner/some-name/trunk?urlpath=lab%2Ftree%2Flab" in page
    assert "github/some-owner/some-name/blob/notebooks/small.ipynb" in page
    assert f'href="{address}/blob/trunk/code/shardlab/first.py#L4"' in page
    assert find_foreign_loads(small_book.root / "_build/html") == []


def test_acronym_is_linked_only_in_its_capitals(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "book/_ext"))
    import first_use

    terms = SimpleNamespace(objects={("term", t): ("book/glossary", t) for t in ("ZeRO", "bubble")})
    env = SimpleNamespace(get_domain=lambda name: terms)
    builder = SimpleNamespace(get_relative_uri=lambda here, there: there)
    page = core.publish_doctree("Bubbles shrink, down to zero, without ZeRO.")
    first_use.link_first_uses(SimpleNamespace(env=env, builder=builder), page, "lessons/a")
    assert [link.astext() for link in page.findall(nodes.reference)] == ["Bubbles", "ZeRO"]


def test_address_that_is_none_is_refused(small_book):
    assert small_book.build(BOOK_REPOSITORY="github.com/x") != 0
    assert "BOOK_REPOSITORY='github.com/x': must be an address like" in small_book.log


def test_changed_style_sheet_is_copied(small_book):
    small_book.write("book/static/course.css", "p { color: red }\n")
    small_book.build_checked()
    assert (small_book.root / "_build/html/_static/course.css").read_text() == "p { color: red }\n"
