"""Calculators in a browser: the course's Python answers there as in a terminal.

Loading Python takes seconds, so that tests share one tab for each calculator.
"""

from __future__ import annotations

import importlib.util
import json
import random

import pytest
from playwright.sync_api import expect
from test_site_pages import AXE, PUT_ASIDE, RULES
from visiting import Visit

from shardlab.common import show
from shardlab.common.shapes import PRESETS
from shardlab.pipeline import SCHEDULE_NAMES

KINDS = {  # where they stand
    "memory": "memory", "mesh": "mesh", "schedule": "pipeline", "strategy": "strategy",
}  # fmt: skip
SLOW = 60_000  # ms: until Python is loaded, where tests share two cores
KEEP_WORKER = "Worker = new Proxy(Worker, {construct: (W, all) => pythonWorker = new W(...all)})"

spec = importlib.util.spec_from_file_location(
    "calculators", show.ROOT / "book/_ext/browser/calculators.py"
)
calculators = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calculators)


def compute_answer(kind: str, given: dict) -> dict:
    """Return the answer of this process's Python."""
    return json.loads(calculators.answer_question(json.dumps({"kind": kind, "given": given})))


@pytest.fixture(scope="module")
def open_calculator(browser, address):
    """Return a function that opens a calculator by name, in the same tab each time."""
    tabs: dict[str, Visit] = {}

    def open_calculator(kind: str):
        if kind not in tabs:
            tabs[kind] = Visit(browser, address)
            tabs[kind].page.add_init_script(KEEP_WORKER)
            tabs[kind].open_page(f"lessons/{KINDS[kind]}.html")
        return tabs[kind], tabs[kind].page.locator(f'form.calculator[data-kind="{kind}"]')

    yield open_calculator
    for tab in tabs.values():
        tab.close()


def fill_fields(form, **values: str) -> None:
    for name, value in values.items():
        field = form.locator(f'[data-name="{name}"]')
        if field.evaluate("e => e.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def fill_all(form, given: dict[str, str]) -> None:
    """Enter these values, and the command's defaults in all other fields."""
    names = "(all) => all.map((field) => [field.dataset.name, field.dataset.default])"
    fill_fields(form, **{**dict(form.locator("[data-name]").evaluate_all(names)), **given})


def press_calculate(form) -> list[list[str]]:
    """Press the button; return the rows of the table as soon as it exists."""
    form.get_by_role("button", name="Calculate").click()
    expect(form.get_by_role("button", name="Stop")).to_be_hidden(timeout=SLOW)
    return form.locator("tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("memory", {"model": "gpt-3-175b", "tp": "8", "sequence_parallel": "yes", "unit": "GiB"}),
        ("strategy", {"model": "llama-3-8b", "gpu": "a100-40", "gpus": "8", "tokens": "1e12"}),
        ("mesh", {"dp": "2", "pp": "2", "tp": "2", "node": "4", "order": "pp,dp,tp"}),
    ],
)
def test_a_table_is_that_of_python(open_calculator, kind, given):
    seen, form = open_calculator(kind)
    fill_all(form, given)
    wanted = compute_answer(kind, {k: True if v == "yes" else v for k, v in given.items()})
    assert press_calculate(form) == wanted["rows"]
    assert form.get_by_role("status").inner_text() == wanted["summary"]
    assert form.locator(".calculator-command").inner_text() == wanted["command"]
    assert seen.wrong == []


@pytest.mark.parametrize(
    "given",
    [
        {"name": "interleaved", "stages": "4", "microbatches": "8", "chunks": "2", "hop": "0.25"},
        {"name": "zb-h1", "stages": "3", "microbatches": "5", "forward": "1,1.5,1"},
    ],
)
def test_a_schedule_is_that_of_python_and_drawn(open_calculator, given):
    seen, form = open_calculator("schedule")
    fill_all(form, given)
    wanted = compute_answer("schedule", given)
    assert press_calculate(form) == wanted["rows"]
    picture = form.get_by_role("img")
    assert wanted["summary"] in picture.get_attribute("aria-label")
    passes = [span for row in wanted["picture"]["spans"] for span in row]
    whole = sum(span["kind"] == "B" for span in passes)  # two shapes each
    assert picture.locator("path").count() == len(passes) + whole
    numbers = picture.locator(".pass-number").all_text_contents()
    assert numbers == [str(span["microbatch"]) for span in passes]
    assert seen.wrong == []


def test_answers_are_those_of_python(open_calculator):
    """Ask the browser's Python thirty questions, valid and invalid ones."""
    chance = random.Random(16)
    pick = chance.choice
    job = {"model": "llama-3-8b", "gpu": "h100", "gpus": "8"}
    questions = [("strategy", job), ("strategy", {**job, "gpus": "12"})]
    for _ in range(20):
        given = {"model": pick(list(PRESETS)), "dp": str(pick([1, 3, 8, 64])), "zero": pick("0123")}
        given |= {"tp": pick("1248"), "pp": pick("1234"), "recompute": pick(["none", "full"])}
        given |= {"batch": pick("1247"), "precision": pick(["bf16", "fp32", "8-bit", "int3"])}
        questions.append(("memory", given))
    for name in SCHEDULE_NAMES:
        given = {"name": name, "stages": pick("1234"), "microbatches": pick("01358")}
        given |= {"forward": pick(["1", "0.37", "1,2"]), "hop": pick(["0", "0.1", "-1"])}
        questions.append(("schedule", given))
    _, form = open_calculator("memory")
    press_calculate(form)  # loads Python
    found = form.page.evaluate(
        """async (questions) => {
          const answers = [];
          for (const question of questions)
            answers.push(await new Promise((done) => {
              pythonWorker.onmessage = (event) => done(event.data);
              pythonWorker.onerror = (event) => done(JSON.stringify(event.message));
              pythonWorker.postMessage(question);
            }));
          return answers;
        }""",
        [json.dumps({"kind": kind, "given": given}) for kind, given in questions],
    )
    wanted = [compute_answer(kind, given) for kind, given in questions]
    assert 5 < sum("error" in one for one in wanted) < len(wanted) - 5
    for question, there, here in zip(questions, map(json.loads, found), wanted, strict=True):
        assert there == here, question


def test_nothing_is_loaded_until_it_is_asked_for_and_a_failure_is_told(visit, address):
    seen = visit("book/index.html")
    asked: list[str] = []
    seen.context.on("request", lambda request: asked.append(request.url))
    seen.open_page("lessons/zero.html")
    assert not [url for url in asked if "calculator" in url or "python.js" in url]
    seen.open_page("lessons/memory.html")
    form = seen.page.locator("form.calculator")
    form.get_by_role("button", name="Calculate").scroll_into_view_if_needed()
    form.locator("input").first.fill("4")
    assert [url.split("/")[-1].split("?")[0] for url in asked if "calculator" in url] == [
        "calculator.css",
        "calculator.js",
    ]
    assert not [url for url in asked if "python" in url]
    assert form.get_by_role("table").get_by_role("rowheader").count() >= 7  # of the first values
    assert form.get_by_role("status").inner_text().startswith("On each rank")
    assert seen.wrong == []
    seen.context.route("**/python.js*", lambda route: route.abort())
    assert press_calculate(form) == []
    assert "could not be loaded" in form.get_by_role("alert").inner_text()
    seen.context.unroute("**/python.js*")
    asked.clear(), seen.wrong.clear()
    assert len(press_calculate(form)) >= 7
    press_calculate(form)
    assert len([url for url in asked if "python/python.js" in url]) == 1
    assert all(url.startswith((address, "blob:")) for url in asked)
    assert seen.wrong == []


def test_keys_are_enough_and_what_comes_is_read_out(open_calculator):
    seen, form = open_calculator("schedule")
    page = seen.page
    assert form.evaluate("e => e.ariaLabel") and form.get_by_role("status").count() == 1
    form.get_by_role("textbox", name="micro-batches").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("6")
    page.keyboard.press("Enter")
    expect(form.get_by_role("status")).to_contain_text("6 micro-batches", timeout=SLOW)
    assert page.evaluate("document.activeElement.dataset.name") == "microbatches"
    for _ in range(10):
        if page.evaluate("document.activeElement.textContent") == "Calculate":
            break
        page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Space")
    expect(form.get_by_role("table")).to_be_visible(timeout=SLOW)
    assert form.get_by_role("table").get_by_role("rowheader").count() == 3
    assert page.evaluate("document.activeElement.textContent") == "Calculate"
    for field in form.locator("input, select").all():
        assert field.evaluate("e => e.labels.length === 1 && e.labels[0].innerText.length > 3")


def test_a_bad_value_gets_one_line_and_the_focus(open_calculator):
    seen, form = open_calculator("memory")
    wrong = form.get_by_role("alert")
    for field, value in (("dp", "0"), ("batch", "many"), ("tp", "5")):
        before = form.locator(f'[data-name="{field}"]').input_value()
        fill_fields(form, **{field: value})
        assert press_calculate(form) == []
        assert wrong.inner_text().startswith(
            f"{field}={value!r}" if value == "many" else f"{field}={value}: "
        )
        assert "\n" not in wrong.inner_text()
        assert f"--{field} {value}" in form.locator(".calculator-command").inner_text()
        assert seen.page.evaluate("document.activeElement.dataset.name") == field
        assert seen.page.evaluate("document.activeElement.ariaInvalid") == "true"
        fill_fields(form, **{field: before})
    assert len(press_calculate(form)) >= 7
    assert wrong.inner_text() == ""
    assert form.locator("[aria-invalid]").count() == 0
    assert seen.wrong == []


def test_what_takes_too_long_can_be_stopped(open_calculator):
    seen, form = open_calculator("schedule")
    fill_all(form, {"name": "1f1b", "stages": "64", "microbatches": "1500"})
    form.get_by_role("button", name="Calculate").click()
    expect(form.get_by_role("status")).to_contain_text("takes some 480 s")
    stop = form.get_by_role("button", name="Stop")
    seen.page.wait_for_function("self.coursePython !== undefined")
    stop.focus()
    stop.click()
    assert stop.is_hidden()
    assert form.get_by_role("status").inner_text() == "Stopped."
    assert seen.page.evaluate("document.activeElement.textContent") == "Calculate"
    fill_fields(form, stages="2", microbatches="2")
    assert len(press_calculate(form)) == 3


@pytest.mark.parametrize(
    ("kind", "given", "scheme"),
    [
        ("memory", {"dp": "1"}, "light"),
        ("schedule", {"stages": "2"}, "light"),
        ("strategy", {"model": "llama-3-8b", "gpu": "h100", "gpus": "2"}, "dark"),
    ],
)
def test_it_fits_a_phone_and_nothing_is_against_it(open_calculator, kind, given, scheme):
    seen, form = open_calculator(kind)
    page = seen.page
    fill_fields(form, **given)
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function(f"document.documentElement.dataset.theme === '{scheme}'")
    assert press_calculate(form)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert form.evaluate("e => e.scrollWidth <= e.clientWidth")
    page.wait_for_timeout(300)  # scrolling boxes get their place in the tab order meanwhile
    page.evaluate(PUT_ASIDE)
    page.evaluate(AXE)
    against = """(rules) => axe.run("form.calculator", { runOnly: rules })
      .then((all) => all.violations.map((one) => [one.id, one.nodes.map((n) => n.html)]))"""
    assert page.evaluate(against, RULES) == []
    fill_fields(form, **{[*given][-1]: "0"})
    assert press_calculate(form) == []
    assert page.evaluate(against, RULES) == []


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_script_it_says_what_to_type(visit, kind):
    page = visit(f"lessons/{KINDS[kind]}.html", java_script_enabled=False).page
    form = page.locator(f'form.calculator[data-kind="{kind}"]')
    assert form.get_by_text("it needs JavaScript. In a terminal:").is_visible()
    assert form.get_by_text(f"python -m shardlab {kind} ").is_visible()
    assert not form.locator("input").first.is_visible()
    assert form.get_by_role("button").count() == 0


def test_on_paper_there_is_a_command_and_what_was_calculated(open_calculator):
    seen, form = open_calculator("memory")
    fill_all(form, {"model": "llama-3-8b"})
    press_calculate(form)
    seen.page.emulate_media(media="print")
    assert not form.locator("input").first.is_visible()
    assert form.locator(".calculator-command").is_visible()
    assert form.get_by_role("table").is_visible()
    seen.page.emulate_media(media="screen")
