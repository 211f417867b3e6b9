"""Decks: their numbers are the pages', they fit, an audience can read them, and the notes open."""

from __future__ import annotations

import re
import sys
from html import unescape
from io import BytesIO

import pytest
import visible
from bs4 import BeautifulSoup
from playwright.sync_api import Page
from pypdf import PdfReader
from test_site_pages import find_violations
from visiting import Visit

from shardcourse import build
from shardlab.common import show

sys.path.append(str(show.ROOT / "book/_ext"))
import deck

TOPICS = build.list_lessons(show.ROOT)
DAILY = ("cluster", "pipeline", "zero")  # long code, steps, formulas
READY = "ready.then(() => true)"
# On each slide, after its last step (with pictures in steps, after each): elements beyond the edge,
# and the smallest text, in pixels, of the slide and of its pictures.
LOOK = """() => {
  const found = [];
  const look = (n, step) => {
    const slide = Reveal.getCurrentSlide(), edge = slide.getBoundingClientRect();
    const seen = (one) => !one.closest("aside, mjx-assistive-mml") && one.checkVisibility();
    let text = 99, drawn = 99;
    for (const one of slide.querySelectorAll("*")) {
      const box = one.getBoundingClientRect();
      if (!seen(one) || !box.width || one.closest(".tall svg")) continue; // one part of it shows
      const over = box.bottom > edge.bottom + 1 || box.right > edge.right + 1
        || box.top < edge.top - 1 || box.left < edge.left - 1
        || (one.matches("pre") && one.scrollWidth > one.clientWidth + 1);
      if (over) found.push(`slide ${n}, step ${step}: ${one.outerHTML.slice(0, 90)}`);
    }
    const walk = document.createTreeWalker(slide, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const one = walk.currentNode.parentElement;
      if (!walk.currentNode.data.trim() || !seen(one) || one.closest("mjx-container")) continue;
      const size = parseFloat(getComputedStyle(one).fontSize);
      if (one.ownerSVGElement) drawn = Math.min(drawn, size * one.ownerSVGElement.getScreenCTM().a);
      else text = Math.min(text, size);
    }
    if (text < 20 || drawn < 14) found.push(`slide ${n}: text of ${text} px, drawn ${drawn} px`);
  };
  for (let n = 0; n < Reveal.getTotalSlides(); n += 1) {
    const steps = Reveal.getSlide(n).matches(".steps") ? 20 : 0;
    for (let step = steps ? -1 : 99; step < Math.max(steps, 100); step += 1) {
      Reveal.slide(n, 0, step);
      look(n, step);
      if (step === 20) break;
    }
  }
  return found.slice(0, 10);
}"""
# All slides at once, one below the other.
SPREAD = """() => {
  Reveal.destroy();
  for (const one of document.querySelectorAll("section")) {
    one.removeAttribute("hidden");
    one.removeAttribute("aria-hidden");
    one.style.cssText = "display: flex; position: static; height: auto";
  }
  for (const one of document.querySelectorAll(".fragment")) one.classList.remove("fragment");
}"""


@pytest.fixture
def open_deck(visit):
    """Return a function that opens a deck of the site: `open_deck("zero", scheme="dark")`."""

    def open_deck(topic: str, **options) -> Visit:
        seen = visit(f"slides/{topic}.html", height=720, reduced_motion="reduce", **options)
        seen.page.evaluate(READY)
        return seen

    return open_deck


def split_slides(site, topic: str) -> list[str]:
    text = (site / f"slides/{topic}.html").read_text("utf-8")
    return [part.partition("<aside")[0] for part in text.split("<section")[1:]]


def strip_blanks(html: str) -> str:
    return "".join(unescape(re.sub(r"<[^>]+>", "", html)).split())


@pytest.mark.parametrize("topic", TOPICS)
def test_a_deck_shows_what_the_page_shows_and_nothing_else(site, topic):
    page = (site / f"lessons/{topic}.html").read_text("utf-8")
    assert f'href="../slides/{topic}.html"' in page
    seen = split_slides(site, topic)
    assert 10 <= len(seen) <= deck.MAX_SLIDES  # the shortest lesson, elastic, has 11
    there = strip_blanks(page)
    for slide in seen:
        for cell in re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", slide):
            assert strip_blanks(cell) in there
        for code in re.findall(r"<pre[^>]*>(.*?)</pre>", slide, re.DOTALL):
            assert strip_blanks(code) in there
        for label in re.findall(r'<svg\b[^>]*aria-label="([^"]*)"', slide):
            assert label in page
        said = re.findall(r'<p class="(?:lead|claim)[^>]*>(.*?)</p>', slide, re.DOTALL)
        numbers = [n for one in said for n in re.findall(r"\d[\d.,]*", strip_blanks(one))]
        assert [n for n in numbers if n not in there] == []


@pytest.mark.parametrize("topic", TOPICS)
def test_a_deck_s_minutes_are_the_lesson_s(site, topic, request):
    if topic not in DAILY and not request.config.getoption("--weekly"):
        pytest.skip("three decks a day, all of them with --weekly")
    page = BeautifulSoup((site / f"lessons/{topic}.html").read_text("utf-8"), "html.parser")
    read = [
        section for section in deck.split_sections(page.article) if section.title != "Exercises"
    ]
    whole = sum(section.seconds for section in read) / 60
    wanted = visible.estimate_minutes((show.ROOT / f"lessons/{topic}.md").read_text("utf-8"))
    assert whole == pytest.approx(wanted, rel=0.2)


@pytest.mark.parametrize("topic", TOPICS)
def test_slides_fit_and_can_be_read_from_afar(open_deck, topic, request):
    if topic not in DAILY and not request.config.getoption("--weekly"):
        pytest.skip("three decks a day, all of them with --weekly")
    seen = open_deck(topic)
    assert seen.page.evaluate(LOOK) == []
    assert seen.wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("topic", TOPICS)
def test_a_deck_meets_wcag(open_deck, topic, scheme, request):
    if topic != "zero" and not request.config.getoption("--weekly"):
        pytest.skip("one deck a day, all of them with --weekly")
    page: Page = open_deck(topic, scheme=scheme).page
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert find_violations(page) == []
    page.evaluate(SPREAD)
    assert find_violations(page, "color-contrast") == []


def test_notes_open_as_files_without_a_network(browser, site):
    tab = Visit(browser, f"{site.as_uri()}/", height=720)
    try:
        tab.page.goto(f"{tab.address}slides/zero.html")
        tab.page.evaluate(READY)
        with tab.page.context.expect_page() as window:
            tab.page.keyboard.press("s")
        notes = window.value.locator(".speaker-controls-notes .value")
        for said in ("After this lesson you can", "Ask first:"):
            tab.page.keyboard.press("Space")
            notes.get_by_text(said).wait_for()
        assert "min" in notes.inner_text()
        assert tab.wrong == []
    finally:
        tab.close()


def test_a_deck_of_a_path_has_its_slides_alone(open_deck, address):
    page = open_deck("zero").page
    whole = page.evaluate("Reveal.getTotalSlides()")
    for path, wanted in (("one_day", range(4, whole)), ("nowhere", [whole])):
        page.goto(f"{address}slides/zero.html?path={path}", wait_until="load")
        page.evaluate(READY)
        assert page.evaluate("Reveal.getTotalSlides()") in wanted


def test_a_deck_prints(open_deck, address):
    page = open_deck("zero").page
    for query, more in (("print-pdf", 0), ("print-pdf&notes", 20)):
        page.goto(f"{address}slides/zero.html?{query}", wait_until="load")
        page.evaluate(READY)
        page.wait_for_selector(".pdf-page")
        printed = PdfReader(BytesIO(page.pdf(prefer_css_page_size=True, print_background=True)))
        count = page.evaluate("document.querySelectorAll('.pdf-page').length")
        assert len(printed.pages) >= count > 12 + more
        assert "model states" in "".join(one.extract_text() for one in printed.pages)
