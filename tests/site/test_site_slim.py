"""Pages load little, and what they leave out until it is needed is there when it is."""

from __future__ import annotations

import gzip
import re

import pytest

HTML = 1_000_000  # bytes of a lesson's page, as it is
LOADED = 250_000  # bytes over the line until a lesson can be read: page, styles and scripts
WITH_MATHS = 600_000  # and when all its mathematics is set


def weight(site, page: str) -> int:
    """The bytes of a page and of what its head loads, compressed."""
    path = site / page
    text = path.read_text("utf-8")
    names = re.findall(r'<(?:script|link rel="stylesheet")[^>]*(?:src|href)="([^"?]+)', text)
    files = [path, *((path.parent / name).resolve() for name in names)]
    return sum(len(gzip.compress(file.read_bytes(), 6)) for file in files)


def test_lessons_are_light(site):
    lessons = sorted(site.glob("lessons/*.html"))
    assert lessons
    for path in lessons:
        assert path.stat().st_size < HTML, path.name
        assert weight(site, f"lessons/{path.name}") < LOADED, path.name


def test_page_loads_one_style_sheet_and_no_search_index(site):
    page = (site / "book/index.html").read_text("utf-8")
    assert re.findall(r'rel="stylesheet" href="([^"?]+)', page)[0].endswith("_static/site.css")
    assert "sections.js" not in page
    assert "sections.js" in (site / "search.html").read_text("utf-8")
    assert "tex-chtml.js" not in page
    assert "maths.js" not in page  # it has none


def test_every_page_says_what_it_is_about(site):
    pages = [site / "search.html", *site.glob("book/*.html"), *site.glob("lessons/*.html")]
    found = {}
    for path in pages:
        text = path.read_text("utf-8")
        described = re.findall(r'<meta name="description" content="([^"]+)"', text)
        assert len(described) == 1, path
        found[path.name] = described[0]
    assert len(set(found.values())) == len(found)
    assert all(20 < len(text) <= 400 for text in found.values()), found


@pytest.mark.parametrize("width", [360, 1280])
def test_what_is_far_takes_the_room_that_it_will_need(visit, width):
    visited = visit("genindex.html", width=width)
    page = visited.page
    page.add_init_script("window.requestIdleCallback = () => 0")  # no spare moments: all stay far
    page.goto(visited.address + "lessons/pipeline.html")
    sizes = (
        "[...document.querySelectorAll('.afar')].map(e => { const box = e.getBoundingClientRect();"
        " return [box.width, box.height]; })"
    )
    far = page.evaluate(sizes)
    assert len(far) > 10
    page.add_style_tag(content=".afar { content-visibility: visible !important }")
    near = page.evaluate(sizes)
    for before, after in zip(far, near, strict=True):
        # A box with a bar to scroll it by is higher by the bar, as soon as it is laid out.
        assert abs(before[0] - after[0]) < 1 and abs(before[1] - after[1]) < 20


def test_after_the_load_everything_gets_its_layout(visit):
    visited = visit("lessons/pipeline.html")
    visited.page.wait_for_function("document.querySelectorAll('.afar').length === 0")
    assert visited.page.locator("pre").count() > 10
    assert visited.wrong == []


def test_mathematics_is_set_when_it_is_to_be_seen(visit):
    visited = visit("book/index.html", width=390)
    page = visited.page
    page.goto(visited.address + "lessons/tensor_parallel.html")  # `go` would set all of it
    assert page.evaluate("document.querySelectorAll('mjx-container').length") == 0
    page.locator(".math").first.scroll_into_view_if_needed()
    page.locator(".math mjx-container").first.wait_for()
    page.wait_for_function(  # the rest follows in spare moments
        "document.querySelectorAll('.math').length > 20 &&"
        "[...document.querySelectorAll('.math')].every(e => e.querySelector('mjx-container'))"
    )
    assert visited.wrong == []


def test_all_mathematics_can_be_asked_for_at_once(visit):
    visited = visit("lessons/gemm.html")
    visited.page.evaluate("setMaths()")
    assert visited.page.evaluate(
        "[...document.querySelectorAll('.math')].every(e => e.querySelector('mjx-container'))"
    )
    sizes = visited.page.evaluate(
        "performance.getEntries().reduce((sum, e) => sum + (e.transferSize ?? 0), 0)"
    )
    assert 100_000 < sizes < WITH_MATHS


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_its_theme_before_any_script_is_loaded(visit, scheme):
    page = visit("book/index.html", scheme=scheme).page
    page.context.route("**/*.js*", lambda route: route.abort())
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == scheme


def test_icons_come_with_the_styles(visit):
    visited = visit("book/index.html", width=390)
    assert visited.page.evaluate(
        "document.fonts.check('900 16px \"Font Awesome 6 Free\"', '\\uf002')"
    )
    asked = visited.page.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
    assert not [name for name in asked if "webfonts" in name]


def test_buttons_that_copy_code_come_with_the_first_movement(visit, address):
    page = visit().page
    page.goto(f"{address}lessons/zero.html", wait_until="load")  # as readers open it
    page.wait_for_timeout(300)
    assert page.locator("button.copybtn").count() == 0
    page.mouse.move(300, 300)
    page.wait_for_selector("button.copybtn", state="attached")
    assert page.locator("button.copybtn").count() > 20
