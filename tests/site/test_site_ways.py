"""Entry points of the course: the landing page's first screen, its map, and a lesson's first and
last lines.
"""

from __future__ import annotations

import re

import pytest

from shardcourse.build import index
from shardlab.common import show

COURSE = index.read_index(show.ROOT)


def test_what_it_is_and_four_ways_in_are_on_one_screen(visit):
    page = visit("book/index.html").page
    door = page.locator(".door").first.bounding_box()
    assert door["y"] > 0 and door["y"] + door["height"] <= 800
    ways = page.locator(".door .sd-card a").evaluate_all("(all) => all.map((a) => a.href)")
    names = [way.rpartition("/")[2] for way in ways]
    assert names == [
        f"{n}.html" for n in ("path_ninety_minutes", "path_monday", "path_ten_weeks")
    ] + ["paths.html"]
    assert page.locator(".door svg[aria-label]").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_map_is_read_and_followed_on_a_phone(visit, scheme):
    page = visit("book/index.html", width=360, height=740, scheme=scheme).page
    boxes = page.locator(".inline-svg a[href^='../lessons/']")
    assert boxes.count() == len(COURSE.topics)
    sizes = boxes.evaluate_all(
        "(all) => all.flatMap((a) => [...a.querySelectorAll('text')].map((t) => "
        "[t.getBoundingClientRect().height, t.getBoundingClientRect().right]))"
    )
    assert all(height >= 9 and right <= 360 for height, right in sizes)
    boxes.nth(1).click()
    page.wait_for_url("**/lessons/*.html")


def test_a_lesson_says_what_it_assumes_and_where_one_goes_from_it(visit):
    page = visit("lessons/zero.html").page
    first = page.locator("h1 + .lesson-assumes").inner_text()
    assert first.startswith("Assumes Data parallelism.") and "minutes to read" in first
    read, waits = map(int, re.findall(r"(\d+) (?:minutes to read|of them can wait)", first))
    assert read - waits <= 60  # a first reading takes an hour
    wait = page.locator(".can-wait").first
    assert wait.inner_text().startswith("This section can wait for a second reading: go on with ")
    wait.get_by_role("link").click()
    assert page.locator("section:target").count() == 1
    onward = page.locator("nav.lesson-next")
    assert "On One day, 13:15 to 14:45: Tensor parallelism" in onward.inner_text()
    onward.get_by_role("link", name="Tensor parallelism").first.click()
    page.wait_for_url("**/lessons/tensor_parallel.html*")
