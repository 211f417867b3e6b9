"""Questions to the reader, in a browser: a number before a table, and a quiz, by keyboard alone."""

from __future__ import annotations

import pytest
from test_site_pages import AXE

PAGE = "lessons/zero.html"
QUIZ = "book/questions_copies.html"


def test_a_number_comes_before_its_table_by_keyboard(visit):
    seen = visit(PAGE, width=360)
    page = seen.page
    box = page.locator(".predict").first
    table = box.locator("table.table")
    assert not table.is_visible()
    field = box.get_by_label("Your number")
    said = box.get_by_role("status")
    field.focus()
    page.keyboard.type("many")
    page.keyboard.press("Enter")
    assert said.inner_text() == "Write a number, as 12.5." and not table.is_visible()
    field.press("Control+a")
    page.keyboard.type("62,82")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Compare"
    page.keyboard.press("Enter")
    assert table.is_visible()
    value = box.get_attribute("data-value")
    cells = [text.strip() for text in table.locator("td").all_inner_texts()]
    assert value in [cell.replace(",", "").removesuffix(".00") for cell in cells]
    assert said.inner_text() == f"You said 62.82, and it is {value}: you said 2.0 times as much."
    page.reload()  # the answer is stored in this browser
    assert box.locator("table.table").is_visible() and field.input_value() == "62.82"
    box.get_by_role("button", name="Hide").press("Enter")
    assert not table.is_visible() and field.input_value() == ""
    assert page.evaluate("Object.keys(localStorage).filter(k => k.startsWith('predict:'))") == []
    box.get_by_role("button", name="Show").press("Enter")
    assert table.is_visible() and said.inner_text() == f"It is {value}."
    assert seen.wrong == []


def test_a_quiz_says_why_and_counts_the_first_try(visit):
    page = visit(QUIZ).page
    quiz = page.locator(".quiz")
    questions = quiz.locator(".quiz-question")
    assert questions.count() == 4
    count = quiz.get_by_role("status")
    for number, question in enumerate(questions.all(), 1):
        wrong = question.locator(".quiz-choice:not([data-right])").first
        right = question.locator(".quiz-choice[data-right]")
        for choice in (wrong, right) if number == 1 else (right, wrong):
            choice.locator("summary").focus()
            page.keyboard.press("Enter")
            assert choice.locator("p").first.is_visible()
        assert right.locator("p").first.inner_text().startswith("Right.")
        assert wrong.locator("p").first.inner_text().startswith("No.")
        page.wait_for_function(
            "n => document.querySelector('.quiz-count').textContent.includes(n)",
            arg=f"{number - 1} of {number} right",
        )
    page.reload()
    assert count.inner_text().startswith("3 of 4 right at the first try.")
    quiz.get_by_role("button", name="Begin again").press("Enter")
    assert count.inner_text() == "Open what you think is right."
    assert page.locator(".quiz-choice[open]").count() == 0


def test_without_a_script_and_on_paper_nothing_is_hidden(visit):
    page = visit(PAGE, java_script_enabled=False).page
    assert page.locator(".predict table.table").first.is_visible()
    assert page.locator(".predict form").count() == 0
    page = visit(PAGE).page
    page.emulate_media(media="print")
    assert page.locator(".predict table.table").first.is_visible()
    assert not page.locator(".predict-form").first.is_visible()
    page = visit(QUIZ).page
    page.emulate_media(media="print")
    heights = "all => all.map(e => e.getBoundingClientRect().height)"
    assert min(page.locator(".quiz-choice p").evaluate_all(heights)) > 10


@pytest.mark.parametrize(("place", "kind"), [(PAGE, ".predict"), (QUIZ, ".quiz")])
def test_axe_has_nothing_against_what_is_open(visit, place, kind):
    page = visit(place, reduced_motion="reduce").page
    for button in page.locator(".predict button", has_text="Show").all():
        button.click()
    for summary in page.locator(".quiz-choice > summary").all():
        summary.click()
    page.evaluate(AXE)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(f"document.documentElement.dataset.theme === '{scheme}'")
        found = page.evaluate("(kind) => axe.run(kind)", kind)["violations"]
        assert [one["id"] for one in found] == [], found
