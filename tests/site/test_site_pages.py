"""Every page in a browser: it loads, it fits, and it satisfies WCAG 2.1 AA.

tests/test_book.py follows the links in the files.
"""

from __future__ import annotations

from pathlib import Path

import axe_playwright_python
import pytest
import yaml
from playwright.sync_api import Page
from visiting import SCREENS

from shardlab.common import show

# The root is the landing page again; a short and a long page of source files.
OTHERS = ["index", "search", "genindex", "code/shardlab/common/shapes", "tests/test_checkpoint"]
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text("utf-8")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
COLOURS = ("color-contrast", "link-in-text-block")
# Most of axe's time goes into colours, word by word. Of words in the same elements of the same
# classes, only the first two are checked; words of a page without errors also count for later
# pages, since all have one style sheet: further style sheets, for pictures in steps and for
# calculators, have classes of their own.
FEWER_WORDS = """(good) => {
  const seen = new Map(good.map((path) => [path, 2]));
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const words = [];
  const paths = new Map([[null, ""]]);
  const name = (one) => {
    if (!paths.has(one))
      paths.set(one, [one.tagName, one.getAttribute("class"), one.getAttribute("style")].join("|")
        .replace(/--(lines|rows): \\d+;?/g, "") + name(one.parentElement)); // heights of code
    return paths.get(one);
  };
  const top = document.querySelector("#pst-back-to-top"); // shows itself to who scrolls up
  if (top) top.style.display = "block";
  while (walk.nextNode()) if (walk.currentNode.data.trim()) words.push(walk.currentNode);
  for (const word of words) {
    const path = name(word.parentElement);
    seen.set(path, (seen.get(path) ?? 0) + 1);
    if (seen.get(path) > 2) {
      for (let up, one = word; !one.childNodes.length; one = up) {
        up = one.parentElement; // axe takes time for what is left of it, too
        one.remove();
      }
    }
  }
  for (const one of document.querySelectorAll("svg, svg *, mjx-container"))
    if (!one.textContent.trim()) one.remove();
  return [...seen.keys()];
}"""
# Colours of code and shapes of pictures are half of a page's elements. The other rules have nothing
# to say on them, so they are put aside meanwhile.
PUT_ASIDE = """() => {
  const speaks = (one) => one.matches("a, title, foreignObject, [style*=spacing]")
    || one.getAttributeNames().some((name) => /^(role|tabindex|lang|aria-.*)$/.test(name));
  window.aside = [...document.querySelectorAll("pre, svg[aria-label]")]
    .filter((one) => ![...one.querySelectorAll("*")].some(speaks))
    .map((one) => [one, [...one.childNodes]]);
  for (const [one] of window.aside)
    one.replaceChildren(...one.tagName === "PRE" ? [one.textContent] : []);
}"""
BRING_BACK = "() => window.aside.forEach(([one, nodes]) => one.replaceChildren(...nodes))"
GOOD: list[str] = []  # places whose words have enough contrast
LOOK = """async () => {
  const images = [...document.querySelectorAll("img")];
  images.forEach((image) => (image.loading = "eager"));
  await Promise.all(images.map((image) => image.decode().catch(() => null)));
  return {
    images: images.filter((image) => !image.naturalWidth).map((image) => image.src),
    twice: [...document.querySelectorAll("[id]")].map((one) => one.id)
      .filter((id, index, all) => all.indexOf(id) !== index),
    unnamed: [...document.querySelectorAll(".inline-svg svg, .shown-figure svg")]
      .map((picture) => picture.getAttribute("aria-label") ?? "")
      .filter((name) => name.split(" ").length < 4 || /[.](svg|png)$/.test(name)),
  };
}"""
# Elements beyond the right edge; inside a scrolling box, the box counts instead.
TOO_WIDE = """() => {
  const all = document.documentElement;
  if (all.scrollWidth <= innerWidth) return [];
  const held = (one) => {
    for (let up = one.parentElement; up && up !== document.body; up = up.parentElement)
      if (getComputedStyle(up).overflowX !== "visible") return true;
    return false;
  };
  const wide = [...document.querySelectorAll("body *")].filter(
    (one) => one.getBoundingClientRect().right > innerWidth + 0.5 && !held(one));
  return [`the page is ${all.scrollWidth} px wide`,
    ...wide.slice(0, 5).map((one) => one.outerHTML.slice(0, 120))];
}"""

HEAD_ENDS = "(heading) => heading.getBoundingClientRect().bottom + scrollY"
LIMIT = 600_000  # bytes sent for a page, with its fonts and the program for mathematics
WEIGHT = "performance.getEntries().reduce((sum, one) => sum + (one.transferSize ?? 0), 0)"


def list_pages() -> list[str]:
    """Return the names of all pages of the table of contents, and of the other pages."""
    toc = yaml.safe_load((show.ROOT / "_toc.yml").read_text("utf-8"))
    return [toc["root"], *(c["file"] for part in toc["parts"] for c in part["chapters"]), *OTHERS]


def find_violations(page: Page, *rules: str) -> list[str]:
    """Return axe's violations: of WCAG 2.1 A and AA without COLOURS, or of `rules` alone."""
    options: dict = {"resultTypes": ["violations"], "preload": False}
    if rules:
        options["runOnly"] = {"type": "rule", "values": rules}
    else:
        options["runOnly"] = {"type": "tag", "values": RULES}
        options["rules"] = {rule: {"enabled": False} for rule in COLOURS}
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE)
    found = page.evaluate("(options) => axe.run(document, options)", options)["violations"]
    return [
        f"{rule['id']}: {node['target']} {node['html'][:150]} {node['failureSummary'][:300]}"
        for rule in found
        for node in rule["nodes"][:5]
    ]


@pytest.mark.parametrize("name", list_pages())
def test_page_is_sound(visit, site, name):
    """One visit for all checks: a long page takes seconds to open."""
    assert (site / f"{name}.html").is_file()
    visited = visit(f"{name}.html", reduced_motion="reduce")  # no colours in transition
    page = visited.page
    page.wait_for_timeout(400)  # scrolling boxes get their place in the tab order meanwhile
    weight = page.evaluate(WEIGHT)
    description = page.locator("meta[name=description]").get_attribute("content")
    seen = page.evaluate(LOOK)
    wrong = {
        "bytes": weight if weight > LIMIT else 0,
        "description": "" if len(description) > 20 else [description],
        "console, network": visited.wrong,
        "pictures that do not load": seen["images"],
        "pictures without a description": seen["unnamed"],
        "ids that stand twice": seen["twice"],
        "wider than 1280 px": page.evaluate(TOO_WIDE),
    }
    page.evaluate(PUT_ASIDE)
    wrong["WCAG"] = find_violations(page)
    for screen, size in SCREENS.items() if name.startswith("lessons/") else ():
        page.set_viewport_size(size)
        end = page.locator(".bd-article h2").first.evaluate(HEAD_ENDS)
        wrong[f"first heading not on a {screen} screen"] = not 0 < end <= size["height"]
    page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_timeout(400)  # other boxes scroll now
    wrong["wider than 360 px"] = page.evaluate(TOO_WIDE)
    rules = ("scrollable-region-focusable", "button-name", "link-name")
    wrong["phone"] = find_violations(page, *rules)
    page.evaluate(BRING_BACK)
    places = page.evaluate(FEWER_WORDS, GOOD)
    page.set_viewport_size({"width": 1280, "height": 800})
    wrong["light"] = find_violations(page, *COLOURS)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    wrong["dark"] = find_violations(page, *COLOURS)
    assert {what: found for what, found in wrong.items() if found} == {}
    GOOD[:] = places


def test_these_tests_would_see_what_is_wrong(visit):
    """Each of the checks above finds its fault."""
    visited = visit("genindex.html")
    page = visited.page
    page.evaluate(
        """() => {
          document.body.insertAdjacentHTML("beforeend", `<img src="/gone.png">
            <i id="two"></i><i id="two"></i>
            <span class="inline-svg"><svg role="img" aria-label="figure.svg"></svg></span>
            <pre><a href="/"></a></pre>
            <p style="width: 3000px; color: #eee; background: #fff">pale and wide</p>`);
          console.error("an error");
        }"""
    )
    seen = page.evaluate(LOOK)
    assert seen["images"] == [f"{visited.address}gone.png"]
    assert seen["unnamed"] == ["figure.svg"]
    assert seen["twice"] == ["two"]
    assert "pale and wide" in page.evaluate(TOO_WIDE)[1]
    page.evaluate(PUT_ASIDE)
    assert any("link-name" in line for line in find_violations(page))
    page.evaluate(BRING_BACK)
    page.evaluate(FEWER_WORDS, [])
    assert any("color-contrast" in line for line in find_violations(page, *COLOURS))
    assert any("an error" in line for line in visited.wrong)
    assert any(line.startswith("404") for line in visited.wrong)
