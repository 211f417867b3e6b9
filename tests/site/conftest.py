"""Fixtures for the built site in a real browser: Debian's Chromium, or Chrome, with Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from serving import serve_folder
from visiting import Visit

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SWITCHES = [
    "--disable-gpu",
    "--disable-dev-shm-usage",  # a container's /dev/shm may be too small for a long page
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of this machine's Chromium or Chrome; skip the test if there is none."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("needs a browser: none of " + ", ".join(NAMES) + " is installed")
    return found


@pytest.fixture(scope="session")
def address(chromium: str, site: Path) -> Iterator[str]:
    """Serve the site with gzip; return its address, "http://127.0.0.1:40123/"."""
    with serve_folder(site) as where:
        yield where


# One for each file, not for the session: while Playwright runs, its event loop is this thread's,
# and other tests that execute notebooks could not run their own.
@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """Return the browser, without a page."""
    switches = SWITCHES + (["--no-sandbox"] if os.geteuid() == 0 else [])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=switches)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Callable[..., Visit]]:
    """Open pages of the site: `visit("lessons/zero.html", width=360, scheme="dark")`.

    Arguments other than `width`, `height` and `scheme` go to Playwright's `new_context`
    (`java_script_enabled=False`, `has_touch=True`, …). All pages are closed after the test.
    """
    opened: list[Visit] = []

    def visit(path: str = "", **options) -> Visit:
        opened.append(Visit(browser, address, **options))
        opened[-1].open_page(path)
        return opened[-1]

    yield visit
    for one in opened:
        one.close()


@pytest.fixture
def page(visit: Callable[..., Visit]) -> Page:
    """Open the landing page, 1280 px wide, in the light theme."""
    return visit("book/index.html").page
