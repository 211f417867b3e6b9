"""Pictures in steps, in a browser: by mouse, by keyboard, without JavaScript, on paper."""

from __future__ import annotations

import pytest

COUNTS = {  # page -> number of steps of each picture, in order
    "collectives": [7],
    "zero": [10],
    "data_parallel": [8],
    "pipeline": [8, 9],
    "tensor_parallel": [8],
    "context_parallel": [6],
}
SHOWN = "e => [...e.querySelectorAll('li')].map(x => getComputedStyle(x).visibility == 'visible')"


def list_visible_steps(box) -> list[int]:
    """Return the numbers of the visible steps, from 1."""
    return [i for i, seen in enumerate(box.evaluate(SHOWN), 1) if seen]


def test_buttons_lead_through_the_steps(visit):
    seen = visit("lessons/pipeline.html", width=360)
    for box, count in zip(seen.page.locator(".steps").all(), COUNTS["pipeline"], strict=True):
        back, forth = (box.get_by_role("button", name=name) for name in ("Previous", "Next"))
        assert list_visible_steps(box) == [1]
        assert box.get_by_text(f"1 of {count}").is_visible()
        ends = [button.get_attribute("aria-disabled") for button in (back, forth)]
        assert ends == ["true", "false"]
        place = forth.bounding_box()["y"] - box.bounding_box()["y"]
        high = box.bounding_box()["height"]
        for step in range(2, count + 1):
            forth.click()
            assert list_visible_steps(box) == [step]
            assert box.get_by_text(f"{step} of {count}").is_visible()
            assert box.locator("li").nth(step - 1).locator("svg").is_visible()
            # Neither the buttons nor the page below move.
            assert forth.bounding_box()["y"] - box.bounding_box()["y"] == place
            assert box.bounding_box()["height"] == high
        assert forth.get_attribute("aria-disabled") == "true"
        forth.click(force=True)  # Playwright considers it disabled, a reader may click
        assert list_visible_steps(box) == [count]
        back.click()
        assert list_visible_steps(box) == [count - 1]
        assert box.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert seen.wrong == []


def test_keys_lead_through_the_steps(visit):
    page = visit("lessons/zero.html").page
    box, count = page.locator(".steps"), COUNTS["zero"][0]
    page.locator("a, button").first.focus()
    box.get_by_role("button", name="Previous").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Next"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    for key, step in (
        ("Enter", 2),
        ("Space", 3),
        ("ArrowRight", 4),
        ("ArrowLeft", 3),
        ("End", count),
        ("ArrowRight", count),
        ("Home", 1),
        ("ArrowLeft", 1),
        ("Control+ArrowRight", 1),
    ):
        page.keyboard.press(key)
        assert list_visible_steps(box) == [step], key
    # The focus stays on the button, even while the button does nothing.
    assert page.evaluate("document.activeElement.textContent") == "Next"


def test_what_changes_is_read_out(visit):
    box = visit("lessons/pipeline.html").page.locator(".steps").last
    assert box.get_attribute("role") == "group"
    assert box.get_attribute("aria-label") == "1F1B on four stages, six micro-batches, in steps"
    assert box.locator(".steps-count").get_attribute("aria-live") == "polite"
    assert box.locator("ol").get_attribute("aria-live") == "polite"
    assert box.get_by_role("img").count() == 1  # the others are hidden from screen readers, too
    box.get_by_role("button", name="Next").click()
    assert box.get_by_role("img").get_attribute("aria-label").startswith("Time 1 to 4.")


@pytest.mark.parametrize("topic", COUNTS)
def test_without_a_script_all_steps_can_be_read(visit, topic):
    page = visit(f"lessons/{topic}.html", java_script_enabled=False).page
    items = page.locator(".steps li")
    assert items.count() == sum(COUNTS[topic])
    tops = [item.bounding_box()["y"] for item in items.all()]
    assert tops == sorted(tops) and len(set(tops)) == len(tops)  # one below the other
    assert all(item.locator("svg").is_visible() for item in items.all())
    assert page.locator(".steps button").count() == 0


def test_on_paper_all_steps_can_be_read(visit):
    page = visit("lessons/collectives.html").page
    page.emulate_media(media="print")
    box = page.locator(".steps")
    assert list_visible_steps(box) == list(range(1, COUNTS["collectives"][0] + 1))
    tops = [item.bounding_box()["y"] for item in box.locator("li").all()]
    assert tops == sorted(tops) and len(set(tops)) == len(tops)
    assert not box.get_by_role("button").first.is_visible()
