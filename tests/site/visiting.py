"""Browser page that records all errors on it."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Request, Response

# Viewports in which a lesson's head and first heading are on one screen.
SCREENS = {"wide": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}


class Visit:
    """One tab in a browser profile of its own; `page` is Playwright's, `wrong` lists the errors.

    `address` is the site's address. `width` and `height` are CSS pixels, `scheme` is the system's
    preference, "light" or "dark"; `options` go to Playwright's `new_context`.
    """

    def __init__(
        self,
        browser: Browser,
        address: str,
        *,
        width: int = 1280,
        height: int = 800,
        scheme: str = "light",
        **options: Any,
    ):
        self.address = address
        self.wrong: list[str] = []
        size = {"width": width, "height": height}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, **options)
        self.context.set_default_timeout(20_000)
        self.context.on("request", self._on_request)
        self.context.on("response", self._on_response)
        self.page = self.context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.wrong.append(f"script: {error}"))

    def open_page(self, path: str) -> Visit:
        """Open a page of the site (or any address) and wait until its layout is complete."""
        self.page.goto(path if "://" in path else self.address + path, wait_until="load")
        self.page.evaluate(
            "async () => { await document.fonts.ready; if (window.setMaths) await setMaths();"
            " if (window.MathJax?.startup?.promise) await MathJax.startup.promise; }"
        )
        return self

    def close(self) -> None:
        """Close the tab and delete its profile."""
        self.context.close()

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"console {message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:", "about:")):
            self.wrong.append(f"asks another host: {request.url}")

    def _on_response(self, response: Response) -> None:
        if response.status >= 400:
            self.wrong.append(f"{response.status}: {response.url}")
