"""The course to take away: exercises as notebooks, the one page, the archive, the PDF."""

from __future__ import annotations

import builtins
import importlib
import io
import re
import symtable
import zipfile

import nbformat
import pytest
from test_book import Page
from throwaway import Book

from shardcourse import build
from shardcourse.build.exercises import exercises, imports, parts
from shardlab.common import show

TOPICS = build.lessons(show.ROOT)
INDEX = (show.ROOT / "book/index.md").read_text("utf-8")


@pytest.fixture
def extension(monkeypatch):
    """Import a module of book/_ext, as Sphinx does."""
    monkeypatch.syspath_prepend(str(show.ROOT / "book/_ext"))
    return importlib.import_module


# --- Exercises as notebooks ---------------------------------------------------------------------


def names(source):
    """The global names that a cell binds, and those that it uses, in its functions, too."""
    binds, uses = set(), set()
    todo = [symtable.symtable(source, "cell", "exec")]
    for table in todo:
        todo += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() == "module" and (symbol.is_assigned() or symbol.is_imported()):
                binds.add(symbol.get_name())
            if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
                uses.add(symbol.get_name())
    return binds, uses


@pytest.mark.parametrize("topic", TOPICS)
def test_exercises_hold_no_solution_and_all_that_they_and_a_solution_use(topic, root):
    """What the cells say when they run is in test_check."""
    book = exercises(topic, root)
    nbformat.validate(book)
    lesson = list(parts(build.notebook(topic, root)))
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    text = "\n".join(cell.source for cell in book.cells)
    assert code[1:] == [p.text for p in lesson if p.place == "exercise" and p.kind == "code"]
    given = {line.strip() for source in code for line in source.splitlines()}
    known = {name for source in code for name in names(source)[0]} | {*dir(builtins)}
    for part in lesson:
        if part.place == "solution":
            assert part.text not in text
        if part.place == "solution" and part.kind == "code":
            lines = {line.strip() for line in part.text.splitlines()}
            assert lines - given  # of each solution, lines that only it has
        if part.place in ("exercise", "solution") and part.kind == "code":
            own, used = names(part.text)
            assert used <= own | known, f"not imported by the lesson's first cell, in {part.text}"
    words = [cell.source for cell in book.cells if cell.cell_type == "markdown"]
    assert words[0].startswith("# Exercises: ") and "make lab" in words[0]
    titles = [text.split(".")[0] for text in words if text.startswith("## ")]
    assert titles == [f"## {number}" for number in range(1, len(titles) + 1)]
    for text in words:  # they lead nowhere
        assert "```{" not in text
        assert not re.search(r"\{[\w:]+\}`|\]\((?!https?:)", text)
    assert nbformat.writes(book) == nbformat.writes(exercises(topic, root))


def test_exercises_begin_with_what_the_first_cell_imports():
    cell = "import os\n# not this\nx = os.name\nfrom a import (\n    b,\n)\n"
    assert imports(cell) == "import os\nfrom a import (\n    b,\n)"


# --- The one page -------------------------------------------------------------------------------

PAGE = """\
<html><head><title>x</title></head><body>
<article class="bd-article"><section id="top"><h1>About {name}<a class="headerlink"
href="#top">#</a></h1><p id="p">See <a href="other.html#p">there</a>, <a href="other.html">all</a>,
<a href="#p">here</a>, <a href="../code/x.html#L3">code</a>, <a href="https://a.b/c#d">far</a>.</p>
<section id="part"><h2>Part<a class="headerlink" href="#part">#</a></h2>
<svg aria-labelledby="t u"><g id="t" fill="url(#u)"/><use xlink:href="#t"/></svg>
<img src="../_images/a.png">
<input name="tab" id="i"><label for="i">a &lt; b</label></section></section></article></body></html>
"""


def test_pages_on_one_page_keep_apart_and_find_each_other(extension):
    everything = extension("everything")
    names = ("book/index", "lessons/one", "lessons/other")
    chapters = [
        everything.Chapter(name, part, PAGE.replace("{name}", name.rpartition("/")[2]))
        for name, part in zip(names, ("", "First", "Second"), strict=True)
    ]
    text = everything.body(chapters)
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert {"one", "one--p", "other--p", "index--t"} <= set(page.ids)
    for wanted in (
        '<a href="#other--p">there</a>, <a href="#other">all</a>',
        '<a href="#one--p">here</a>, <a href="code/x.html#L3">code</a>',
        '<a href="https://a.b/c#d">far</a>',
        'aria-labelledby="one--t one--u"',
        'fill="url(#one--u)"',
        'xlink:href="#one--t"',
        'src="_images/a.png"',
        '<input name="one--tab" id="one--i"><label for="one--i">a &lt; b</label>',
        '<a href="#one--part">Part</a>',
    ):
        assert wanted in text, wanted
    anchors = {f"#{name}" for name in page.ids}
    # The landing page's links to pages that are no chapters lead to those pages.
    assert {link for link in page.links if link.startswith("#")} <= anchors
    strays = [link for link in page.links if "other.html" in link]
    assert strays == ["book/other.html#p", "book/other.html"]
    levels = re.findall(r"<h(\d)[^>]*>\s*(\w+ ?\w*)", text)
    assert levels == [
        ("1", "About index"),
        ("2", "Part"),
        ("2", "Contents"),
        ("2", "First"),
        ("3", "About one"),
        ("4", "Part"),
        ("2", "Second"),
        ("3", "About other"),
        ("4", "Part"),
    ]


# --- What the build makes -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small book that lists its editions."""
    book = Book(tmp_path_factory.mktemp("editions"))
    listed = re.search(r'<ul class="editions">.*?</ul>\n', INDEX, re.DOTALL)
    book.edit("book/index.md", "# A book\n", f"# A book\n\n{listed[0]}")
    book.write(
        "_toc.yml",
        "format: jb-book\nroot: book/index\nparts:\n  - caption: First\n    chapters:\n"
        "      - file: lessons/small\n  - caption: Second\n    chapters:\n"
        "      - file: book/execution\n",
    )
    return book.built()


def test_small_book_has_all_on_one_page_and_in_one_archive(small, extension):
    site = small.root / "_build/html"
    page = small.page("everything")
    found = Page(page)
    assert len(found.ids) == len(set(found.ids))
    assert found.foreign == []
    order = [
        page.index(f'<div class="{kind}" id="{name}">')
        for kind, name in (
            ("edition-opening", "index"),
            ("edition-chapter", "small"),
            ("edition-chapter", "execution"),
        )
    ]
    assert order == sorted(order)
    assert "the answer is 42" in page
    assert 'href="#execution--about"' in page
    assert page.count('id="small--svg0-box"') == 1
    assert "mathjax" in page or "maths.js" in page
    assert 'class="editions"' not in page
    listed = small.page("book/index")
    assert 'href="../everything.html"' in listed
    assert 'href="../downloads/one-model-many-gpus.zip"' in listed
    assert ".pdf" not in listed
    packed = site / "downloads/one-model-many-gpus.zip"
    assert packed.read_bytes() == extension("editions").archive(site)
    with zipfile.ZipFile(packed) as file:
        assert file.testzip() is None
        names = {name.removeprefix("one-model-many-gpus/") for name in file.namelist()}
        inside = file.read("one-model-many-gpus/book/index.html").decode()
    every = {p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()}
    assert every - names == {"downloads/one-model-many-gpus.zip", ".buildinfo"}
    assert 'href="../everything.html"' in inside
    assert "one-model-many-gpus.zip" not in inside


def test_one_page_follows_its_chapters(small):
    small.edit("lessons/small.md", "says one thing", "says another thing")
    small.built()
    assert small.executed == []
    assert "says another thing" in small.page("everything")
    with zipfile.ZipFile(small.root / "_build/html/downloads/one-model-many-gpus.zip") as file:
        assert "says another thing" in file.read("one-model-many-gpus/lessons/small.html").decode()


def test_pdf_needs_a_browser_and_says_so(extension, monkeypatch):
    pdf = extension("pdf")
    monkeypatch.setattr(pdf.shutil, "which", lambda name: None)
    with pytest.raises(pdf.NoBrowser, match="chromium, .*apt-get install chromium"):
        pdf.browser()


def test_pdf_has_pages_outline_and_links(small, extension):
    pdf = extension("pdf")
    try:
        pdf.browser()
    except pdf.NoBrowser as error:
        pytest.skip(str(error))
    from pypdf import PdfReader

    small.built(PDF="1")
    path = small.root / "_build/html/downloads/one-model-many-gpus.pdf"
    assert 'one-model-many-gpus.pdf"' in small.page("book/index")
    reader = PdfReader(io.BytesIO(path.read_bytes()))
    texts = [page.extract_text() for page in reader.pages]
    assert len(texts) >= 4  # landing page, contents, two parts
    assert "the answer is 42" in "".join(texts)
    assert reader.metadata.title == "A book"

    def titles(items):
        return [x for i in items for x in (titles(i) if isinstance(i, list) else [i.title])]

    outline = titles(reader.outline)
    assert [t for t in outline if t in ("A small lesson", "How", "About")] == [
        "A small lesson",
        "How",
        "About",
    ]
    links = [a.get_object() for page in reader.pages for a in page.get("/Annots", [])]
    assert any("/Dest" in link or link.get("/A", {}).get("/S") == "/GoTo" for link in links)
    small.built()
    assert not path.exists()
    assert ".pdf" not in small.page("book/index")


# --- The course's own site ----------------------------------------------------------------------


def test_site_on_one_page_is_sound(site, root):
    page = Page((site / "everything.html").read_text("utf-8"))
    assert {name for name in page.ids if page.ids.count(name) > 1} == set()
    assert set(TOPICS) <= set(page.ids)
    assert [name for name in page.unnamed if "logo" not in name] == []
    for topic in TOPICS:
        assert any(name.startswith(f"{topic}--") for name in page.ids)


def test_every_lesson_offers_its_exercises(site, root):
    for topic in TOPICS:
        lesson = (site / f"lessons/{topic}.html").read_text("utf-8")
        assert f'href="../downloads/{topic}_exercises.ipynb"' in lesson
        book = nbformat.read(site / f"downloads/{topic}_exercises.ipynb", as_version=4)
        assert book.cells == exercises(topic, root).cells
