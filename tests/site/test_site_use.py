"""Use of the site: search, colour themes, keyboard alone."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

LESSON = "lessons/data_parallel.html"
# Elements that a keyboard should reach: visible, and to be pressed or followed.
REACHABLE = """() => {
  const all = "a[href], button, summary, input, select, textarea, [tabindex='0']";
  const seen = (one) => one.checkVisibility({ visibilityProperty: true })
    && !one.closest("[inert]") && one.getClientRects().length > 0;
  return [...document.querySelectorAll(all)].filter((one) => seen(one) && !one.disabled
    && one.tabIndex >= 0).map((one, number) => (one.dataset.number = number, number)).length;
}"""
# The focused element: its number, its place in the page, and whether its focus is visible.
FOCUSED = """() => {
  const one = document.activeElement, box = one.getBoundingClientRect();
  const styles = [getComputedStyle(one)], over = getComputedStyle(one, "::after");
  if (over.content !== "none") styles.push(over); // a card's link covers it so
  let opacity = 1;
  for (let up = one; up; up = up.parentElement) opacity *= getComputedStyle(up).opacity;
  const ring = styles.some((s) => s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 1);
  const shadow = styles.some((s) =>
    /(^|\\s)[1-9][.\\d]*px/.test(s.boxShadow.replace(/rgba?\\([^)]*\\)/g, "")));
  return {
    number: Number(one.dataset.number ?? -1),
    body: one === document.body,
    html: one.outerHTML.slice(0, 120),
    shown: opacity > 0.5 && box.width > 0 && box.bottom > 0 && box.top < innerHeight
      && box.right > 0 && box.left < innerWidth,
    marked: ring || shadow,
  };
}"""


def open_tour(page: Page, most: int = 600) -> list[dict]:
    """Press Tab until the keyboard leaves the page; return the focused elements, in order."""
    stops: list[dict] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        here = page.evaluate(FOCUSED)
        if here["body"] or (stops and here["number"] == stops[0]["number"]):
            return stops
        stops.append(here)
    raise AssertionError(f"after {most} steps the keyboard is still in the page: {stops[-3:]}")


@pytest.mark.parametrize(("path", "width"), [("book/index.html", 360), (LESSON, 1280)])
def test_tab_reaches_everything_and_shows_where_it_is(visit, path, width):
    visited = visit(path, width=width, reduced_motion="reduce")
    before, count = None, visited.page.evaluate(REACHABLE)
    while before != count:  # scrolling boxes join the tab order after the page has loaded
        visited.page.wait_for_timeout(1000)
        before, count = count, visited.page.evaluate(REACHABLE)
    stops = open_tour(visited.page)
    assert count > 10
    missed = set(range(count)) - {stop["number"] for stop in stops}
    assert [
        visited.page.locator(f'[data-number="{n}"]').evaluate(
            "(one) => one.outerHTML.slice(0, 150)"
        )
        for n in sorted(missed)
    ] == []
    assert [stop["html"] for stop in stops if not stop["shown"]] == []
    assert [stop["html"] for stop in stops if not stop["marked"]] == []
    numbers = [stop["number"] for stop in stops]
    assert numbers == sorted(numbers), "the keyboard jumps back and forth"
    assert visited.wrong == []


def test_skip_link_folded_cells_and_solutions_by_keyboard(visit):
    page = visit("lessons/gemm.html", reduced_motion="reduce").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to main content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("!!document.activeElement.closest('main')")

    fold = page.locator("details.hide").first
    assert not fold.evaluate("(one) => one.open")
    fold.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert fold.evaluate("(one) => one.open")

    solution = page.locator(".solution.dropdown").first
    inside = solution.locator("div.highlight").first
    assert not inside.is_visible()
    solution.locator("button.toggle-button, summary").first.focus()
    page.keyboard.press("Enter")
    inside.wait_for(state="visible")
    page.keyboard.press("Enter")
    inside.wait_for(state="hidden")


def test_everything_can_be_read_without_scripts(visit):
    visited = visit(LESSON, java_script_enabled=False, width=360)
    assert visited.page.locator(".solution.dropdown div.highlight").first.is_visible()
    assert visited.page.locator("h2").count() > 5
    assert visited.wrong == []


def test_search_finds_and_leads_there(visit):
    visited = visit("book/index.html", reduced_motion="reduce")
    page = visited.page
    page.keyboard.press("Control+k")
    page.keyboard.type("all-reduce")
    page.keyboard.press("Enter")
    result = page.locator("#search-results li a").first
    result.wait_for()
    links = page.locator("#search-results li a").evaluate_all("(all) => all.map((a) => a.href)")
    assert any("/lessons/" in link for link in links)
    result.click()
    page.wait_for_load_state()
    assert "all" in page.inner_text("main").lower()
    visited.open_page("search.html?q=xylophone")
    page.get_by_text("Nothing has “xylophone” in it").wait_for()
    assert visited.wrong == []


def test_colours_follow_the_system_and_the_button(visit):
    visited = visit("book/index.html", scheme="dark", reduced_motion="reduce")
    page = visited.page
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    page.wait_for_function("document.documentElement.dataset.theme === 'light'")
    light = page.evaluate(ground)
    assert dark != light
    seen = set()
    for _ in range(3):  # light, dark, the system's
        page.locator(".theme-switch-button:visible").focus()
        page.keyboard.press("Enter")
        mode = page.evaluate("document.documentElement.dataset.mode")
        shown = page.evaluate(ground)
        assert shown == (dark if mode == "dark" else light), mode
        seen.add(mode)
        visited.open_page("book/setup.html")  # the choice is kept
        assert page.evaluate("document.documentElement.dataset.mode") == mode
        assert page.evaluate(ground) == shown
    assert seen == {"light", "dark", "auto"}
    assert visited.wrong == []


def test_side_bar_opens_on_a_phone_by_keyboard(visit):
    page = visit(LESSON, width=360, reduced_motion="reduce").page
    link = page.locator("#pst-primary-sidebar nav a, #pst-primary-sidebar-modal nav a").first
    assert not link.is_visible()
    page.locator("button.primary-toggle").focus()
    page.keyboard.press("Enter")
    link.wait_for(state="visible")
    page.keyboard.press("Escape")
    link.wait_for(state="hidden")


def test_pictures_scroll_in_their_box_where_text_would_get_too_small(visit):
    page = visit("lessons/pipeline.html", width=360).page
    page.wait_for_timeout(400)
    boxes = page.locator(".inline-svg").evaluate_all(
        """(all) => all.map((box) => ({
          scrolls: box.scrollWidth > box.clientWidth + 1,
          reached: box.tabIndex === 0,
          text: Math.min(...[...box.querySelectorAll("text")].map((text) => {
            const scale = text.ownerSVGElement.getScreenCTM().a;
            return parseFloat(getComputedStyle(text).fontSize) * scale;
          })),
        }))"""
    )
    assert any(box["scrolls"] for box in boxes)
    assert [box for box in boxes if box["scrolls"] != box["reached"]] == []
    assert min(box["text"] for box in boxes) > 8.9


def test_root_is_the_landing_page(visit, site):
    visited = visit("")
    page = visited.page
    assert page.title() == "One Model, Many GPUs"
    assert page.locator("html").get_attribute("lang") == "en"
    page.locator("main a[href*='lessons/']").first.click()
    page.wait_for_load_state()
    assert "/lessons/" in page.url
    assert visited.wrong == []


def test_page_is_dark_before_any_script_loads(visit):
    visited = visit(scheme="dark")
    visited.page.route("**/*.js*", lambda route: route.abort())
    visited.open_page(LESSON)
    assert visited.page.locator("html").get_attribute("data-theme") == "dark"
