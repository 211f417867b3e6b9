"""Version line in the footer, in a browser: alone, and beside sites of releases."""

from __future__ import annotations

import json

LISTED = [{"name": "9.9", "path": ""}, {"name": "v0.1", "path": "versions/v0.1/"}]


def test_the_reader_asks_for_other_versions(visit):
    seen = visit("lessons/zero.html")
    line = seen.page.locator(".versions")
    line.get_by_role("button", name="Other versions").press("Enter")
    line.get_by_text("is the only one here.").wait_for()
    seen.page.route(
        "**/versions.json",
        lambda route: route.fulfill(body=json.dumps(LISTED), content_type="application/json"),
    )
    seen.page.reload()
    line.get_by_role("button", name="Other versions").press("Enter")
    link = line.get_by_role("link", name="v0.1")
    link.wait_for()
    assert link.evaluate("e => e.href") == f"{seen.address}versions/v0.1/"
    assert line.get_by_role("link").count() == 1
    assert seen.wrong == []
