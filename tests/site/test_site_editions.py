"""In a browser: the course on one page, and the archive opened as files."""

from __future__ import annotations

import zipfile

import pytest
from visiting import Visit


@pytest.fixture(scope="module")
def unpacked(site, tmp_path_factory) -> str:
    """The address of the unpacked archive's folder."""
    folder = tmp_path_factory.mktemp("archive")
    with zipfile.ZipFile(site / "downloads/one-model-many-gpus.zip") as file:
        file.extractall(folder)
    return f"{(folder / 'one-model-many-gpus').as_uri()}/"


@pytest.fixture
def offline(browser, unpacked):
    """A tab for the archive's files."""
    visit = Visit(browser, unpacked)
    yield visit
    visit.close()


def test_archive_works_as_files(offline):
    offline.go("index.html")
    offline.page.wait_for_selector(".bd-article h1")
    for name in ("book/index.html", "lessons/zero.html"):
        offline.go(name)
        broken = offline.page.evaluate(
            "[...document.images].filter(i => i.loading !== 'lazy' && !i.naturalWidth)"
            ".map(i => i.src)"
        )
        assert broken == []
    # Styles arrived, and so did the fonts of the formulas.
    assert offline.page.locator("mjx-container").count() > 10
    assert offline.page.locator(".bd-sidebar-primary").first.is_visible()
    icon = "document.fonts.load('900 16px \"Font Awesome 6 Free\"', '\\uf002')"
    assert offline.page.evaluate(f"{icon}.then((all) => all.length)") == 1
    assert offline.wrong == []


def test_calculators_of_the_archive_calculate(offline):
    offline.go("lessons/pipeline.html")
    form = offline.page.locator("form.calculator")
    form.get_by_role("button", name="Calculate").click()
    form.get_by_role("table").wait_for(timeout=60_000)
    assert form.get_by_role("img").locator("path").count() > 90
    assert offline.wrong == []


def test_search_of_the_archive_finds(offline):
    offline.go("search.html?q=reduce-scatter")
    results = offline.page.locator("ol.search li a")
    results.first.wait_for()
    assert results.count() >= 3
    results.first.click()
    offline.page.wait_for_load_state("load")
    assert "reduce-scatter" in offline.page.content()
    assert offline.wrong == []


def test_one_page_reads_well(visit, request):
    if not request.config.getoption("--whole"):
        pytest.skip("a minute, for the longest page: with --whole")
    tab = visit("everything.html", width=360)
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.page.locator("mjx-container").count() > 100
    entry = tab.page.locator('.edition-contents a[href="#zero"]').first
    entry.click()
    tab.page.wait_for_function("location.hash === '#zero'")
    box = tab.page.locator("#zero h3").first.bounding_box()
    assert box is not None and -50 < box["y"] < 400
    assert tab.wrong == []
