"""The site as files on a disk, without a network: it opens, calculates and searches."""

from __future__ import annotations

import pytest
from visiting import Visit


@pytest.fixture
def offline_tab(browser, site):
    """Return a tab that can load only files."""
    tab = Visit(browser, f"{site.as_uri()}/", offline=True)
    yield tab
    tab.close()


@pytest.mark.parametrize("name", ["index", "lessons/gemm", "book/setup"])
def test_pages_open_from_a_disk(offline_tab, name):
    offline_tab.open_page(f"{name}.html")
    assert offline_tab.page.locator(".bd-sidebar-primary").first.is_visible()
    assert offline_tab.wrong == []


def test_calculators_calculate_from_a_disk(offline_tab):
    offline_tab.open_page("lessons/pipeline.html")
    form = offline_tab.page.locator("form.calculator")
    form.get_by_role("button", name="Calculate").click()
    form.get_by_role("table").wait_for(timeout=60_000)
    assert offline_tab.wrong == []


def test_search_finds_from_a_disk(offline_tab):
    offline_tab.open_page("search.html?q=reduce-scatter")
    results = offline_tab.page.locator("ol.search li a")
    results.first.wait_for()
    assert results.count() >= 3
    assert offline_tab.wrong == []
