"""Print the whole course, the page everything.html, into one PDF, with a browser.

    python book/_ext/pdf.py _build/html/everything.html course.pdf

The browser is the machine's own Chromium or Chrome, driven by Playwright; the page's style sheet
holds the paper's size, the page numbers and what is different on paper.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
_TIMEOUT = 300_000  # ms: for one step, on a busy machine
_READY = """async () => {
  await document.fonts.ready;
  if (window.setMaths) await window.setMaths();
  else if (window.MathJax?.startup?.promise) await MathJax.startup.promise;
  for (const box of document.querySelectorAll("details")) box.open = true;
  for (const box of document.querySelectorAll(".toggle-hidden")) {
    box.classList.remove("toggle-hidden");
  }
  const headings = [...document.querySelectorAll(".edition :is(h1, h2, h3, h4, h5, h6)")];
  const titles = headings.map((heading) => {
    const bare = heading.cloneNode(true);
    bare.querySelectorAll(".headerlink").forEach((link) => link.remove());
    return bare.textContent.trim().replace(/\\s+/g, " ");
  });
  document.title = titles[0];
  return titles.filter((title) => title);
}"""


class NoBrowser(Exception):
    """There is nothing to print with."""


def browser() -> str:
    """The path of a browser. Raises NoBrowser when this machine has none."""
    for name in BROWSERS:
        path = shutil.which(name)
        if path:
            return path
    raise NoBrowser(
        f"a PDF is printed by Chromium or Chrome, and this machine has none of the commands "
        f"{', '.join(BROWSERS)}. On Debian or Ubuntu: apt-get install chromium. "
        f"The course on one page, everything.html, prints from any browser."
    )


def write(page: Path, pdf: Path) -> None:
    """Print the file `page` into the file `pdf`: all solutions open, with outline and links."""
    program = browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=_ARGUMENTS)
        try:
            tab = chromium.new_page(color_scheme="light", viewport={"width": 1000, "height": 1200})
            tab.set_default_timeout(_TIMEOUT)
            tab.goto(page.resolve().as_uri())
            titles = tab.evaluate(_READY)
            tab.emulate_media(media="print", color_scheme="light")
            half = pdf.with_suffix(".part")  # a reader finds the old file or the new one
            tab.pdf(
                path=half,
                prefer_css_page_size=True,
                print_background=True,
                outline=True,
                tagged=True,
            )
        finally:
            chromium.close()
    name_outline(half, titles)
    half.replace(pdf)


def name_outline(pdf: Path, titles: list[str]) -> None:
    """Give the entries of a PDF's outline their `titles`, in order.

    Where a heading moves to the next page, Chromium writes its words into the outline twice, and
    it leaves out the blanks at the ends of its lines.
    """
    from pypdf import PdfWriter
    from pypdf.generic import NameObject, TextStringObject

    writer = PdfWriter(pdf, incremental=True)

    def entries(parent: Any) -> Iterator[Any]:
        child = parent.get("/First")
        while child is not None:
            yield child.get_object()
            yield from entries(child.get_object())
            child = child.get_object().get("/Next")

    found = list(entries(writer.root_object["/Outlines"].get_object()))
    if len(found) != len(titles):
        raise ValueError(f"{pdf}: {len(found)} entries in the outline of {len(titles)} headings")
    for entry, title in zip(found, titles, strict=True):
        entry[NameObject("/Title")] = TextStringObject(title)
    writer.write(pdf)


if __name__ == "__main__":
    begin = time.monotonic()
    try:
        write(Path(sys.argv[1]), Path(sys.argv[2]))
    except NoBrowser as error:
        sys.exit(str(error))
    print(f"{sys.argv[2]}: {time.monotonic() - begin:.0f} s")
