"""Entry points of the course: the landing page's first screen, its map, and a lesson's first and
last lines.
"""

from __future__ import annotations

import re

from visiting import SCREENS

from shardcourse.build import index
from shardlab.common import show

COURSE = index.read_index(show.ROOT)


def test_what_it_is_and_the_ways_in_are_on_one_screen(visit):
    page = visit("book/index.html").page
    door = page.locator(".door").first.bounding_box()
    assert door["y"] > 0 and door["y"] + door["height"] <= 800
    minutes = COURSE.pages["model_parallelism"].read_minutes
    begin = page.locator(".door .sd-card-title").first.inner_text()
    assert begin.strip() == f"Begin: Model parallelism, {minutes} minutes"
    ways = page.locator(".door .sd-card a").evaluate_all("(all) => all.map((a) => a.href)")
    names = [way.rpartition("/")[2] for way in ways]
    paths = ("path_ninety_minutes", "path_monday", "path_ten_weeks", "paths")
    assert names == [f"{name}.html" for name in ("model_parallelism", *paths)]
    assert page.locator(".door svg[aria-label]").count() == 1


def test_the_lessons_are_listed_once_on_one_screen(visit):
    page = visit("book/index.html", **SCREENS["wide"]).page
    assert page.locator(".lesson-map").bounding_box()["height"] <= 700
    names = "(all) => all.map((a) => a.href.split('/').pop().replace('.html', ''))"
    links = page.locator(".lesson-map a")
    assert links.evaluate_all(names) == [*COURSE.topics]
    assert links.first.get_attribute("title") == COURSE.topics["model_parallelism"].able
    tails = page.locator(".lesson-map li", has=page.get_by_role("link", name="Meshes"))
    assert "needs ZeRO, Pipeline parallelism and Tensor parallelism" in tails.inner_text()
    links.nth(1).click()
    page.wait_for_url("**/lessons/memory.html")


def test_a_lesson_says_what_it_assumes_and_where_one_goes_from_it(visit):
    page = visit("lessons/zero.html").page
    first = page.locator("h1 + .lesson-head").inner_text()
    assert "Assumes Data parallelism." in first
    read, whole = re.match(r"(\d+) minutes to read \((\d+) with what can wait\)", first).groups()
    assert int(read) <= 60 < int(whole)  # a first reading takes an hour
    wait = page.locator(".can-wait").first
    assert wait.inner_text().startswith("This section can wait for a second reading: go on with ")
    wait.get_by_role("link").click()
    assert page.locator("section:target").count() == 1
    stop = page.locator("#three-stages-in-a-picture .path-stop")
    says = "On the path Ninety minutes: stop here, next: Pipeline parallelism: Naive pipeline"
    assert stop.inner_text().startswith(says)
    stop.get_by_role("link").first.click()
    page.wait_for_url("**/lessons/pipeline.html#naive-pipeline*")
    page.go_back()
    onward = page.locator("nav.lesson-next")
    assert "On One day, 13:15 to 14:45: Tensor parallelism" in onward.inner_text()
    onward.get_by_role("link", name="Tensor parallelism").first.click()
    page.wait_for_url("**/lessons/tensor_parallel.html*")


def test_nothing_lies_on_a_phone_s_text_and_no_heading_is_orange(visit):
    page = visit("lessons/gemm.html#what-it-costs", **SCREENS["phone"]).page
    colour = "(one) => getComputedStyle(one).backgroundColor"
    assert page.locator("section:target > h2").evaluate(colour) == "rgba(0, 0, 0, 0)"
    page.mouse.wheel(0, 2000)
    page.wait_for_timeout(300)
    page.mouse.wheel(0, -300)  # who scrolls up is offered the way back to the top
    page.wait_for_timeout(300)
    assert page.locator("#pst-back-to-top").is_hidden()
