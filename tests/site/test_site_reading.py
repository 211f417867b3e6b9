"""Reading aids of a long page: folds with titles, a contents list that follows, search words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

LESSON = "lessons/gemm.html"


def test_a_switch_opens_and_closes_all_folded_code(visit):
    page = visit(LESSON).page
    folds = page.locator("details.above-input, details.shown-source")
    opened = "(all) => all.filter((one) => one.open).length"
    switch = page.get_by_role("button", name="Open all folded code")
    assert folds.evaluate_all(opened) == 0 < folds.count()
    switch.click()
    assert folds.evaluate_all(opened) == folds.count()
    switch.click()
    assert folds.evaluate_all(opened) == 0


def test_the_switch_is_not_shown_where_it_would_do_nothing(visit):
    page = visit(LESSON, java_script_enabled=False).page
    assert page.locator(".open-folds").is_hidden()


def test_100_columns_of_code_fit_on_a_screen_of_1440_pixels(visit):
    boxes = visit(LESSON, width=1440).page.locator(".shown-source:not(details) pre")
    rows = boxes.evaluate_all("""(boxes) => boxes.map((box) => {
      const line = Object.assign(document.createElement("span"), {textContent: "x".repeat(100)});
      box.append(line);
      return line.getClientRects().length;
    })""")
    assert rows and set(rows) == {1}


def test_contents_follow_the_reader_who_jumps(visit):
    page = visit(LESSON, width=1440, reduced_motion="reduce").page
    headings = page.locator("article h2, article h3")
    for number in (3, 7, 2):
        marked = page.locator("#pst-page-toc-nav a.active")
        page.wait_for_function(  # again if the text above has grown meanwhile: a picture was loaded
            """(heading) => {
              scrollTo(0, heading.getBoundingClientRect().top + scrollY - 100);
              const marked = document.querySelector('#pst-page-toc-nav a.active');
              return marked?.textContent === heading.firstChild.textContent;
            }""",
            arg=headings.nth(number).element_handle(),
            polling=300,
        )
        assert marked.count() == 1


@pytest.mark.parametrize("path", [LESSON, "book/project.html", "book/path_ninety_minutes.html"])
def test_a_table_that_does_not_fit_is_a_list_on_a_phone(visit, path):
    page = visit(path, width=390).page
    tables = page.locator("article table.narrows")
    fits = "(all) => all.map((one) => one.scrollWidth <= one.parentElement.clientWidth)"
    assert all(fitting := tables.evaluate_all(fits)) and fitting
    cell = tables.first.locator("td[data-head]").first
    assert cell.evaluate("(one) => getComputedStyle(one, '::before').content.length > 2")


def test_a_word_of_the_glossary_is_a_link_where_it_is_first_used(site):
    glossary = (site / "book/glossary.html").read_text("utf-8")
    for path in sorted(site.glob("lessons/*.html")):
        links = re.findall(r'<a class="first-use[^>]*>', path.read_text("utf-8"))
        ends = [re.search(r'href="[^"]*glossary\.html#([^"]+)"', link)[1] for link in links]
        assert len(ends) >= 8, path.name
        assert len(ends) == len(set(ends)), path.name
        assert all(f'id="{end}"' in glossary for end in ends), path.name


# Queries of a word or two, with sections that must all be among the first three results.
QUERIES = {
    "OOM": ["symptoms#out-of-memory-oom", "memory#what-out-of-memory-looks-like"],
    "MFU": ["symptoms#low-mfu"],
    "FSDP": ["zero"],
    "deadlock": ["symptoms#a-hang"],
    "NCCL timeout": ["symptoms#nccl-timeout", "symptoms#a-hang"],
    "activation checkpointing": ["memory#recomputation"],
    "all-reduce": ["glossary#term-all-reduce"],
    "bubble": ["glossary#term-bubble", "pipeline"],
    "1F1B": ["pipeline"],
    "DDP": ["data_parallel"],
    "loss spike": ["symptoms#the-loss-spikes"],
    "gradient accumulation": ["train#accumulation", "glossary#term-gradient-accumulation"],
    "torchrun": ["glossary#term-torchrun", "cluster"],
    "row parallel bias": ["tensor_parallel"],
    "pipeline": ["pipeline"],
    "how many tokens fit": ["context_parallel#the-longest-context-that-fits"],
    "zero_grad": ["data_parallel"],
    # Sections with more words to find them by, in synonyms.yml.
    "which gpu": ["cluster#device-numbers", "strategy#choosing"],
    "bf16": ["train#bf16"],
    "GQA": ["tensor_parallel#gqa", "memory#memory-of-a-hugging-face"],
}
# The first three results of each query: the search page's script runs anew for each.
SEARCH = """async (queries) => {
  const found = [], list = document.querySelector("#search-results");
  for (const query of queries) {
    history.replaceState(null, "", `?q=${encodeURIComponent(query)}`);
    list.replaceChildren();
    await new Promise((onload) => document.head.append(
      Object.assign(document.createElement("script"), { src: "_static/search.js", onload })));
    found.push([...list.querySelectorAll("a")].slice(0, 3).map((link) => link.href));
  }
  return found;
}"""


def test_search_leads_to_sections(visit):
    text = Path(__file__).with_name("search_questions.yml").read_text("utf-8")
    asked = yaml.safe_load(text)
    everything = {**QUERIES, **asked["first_time"], **asked["forums"]}
    first = dict(
        zip(everything, visit("search.html").page.evaluate(SEARCH, [*everything]), strict=True)
    )

    def is_found(query: str, wanted: str) -> bool:
        page, _, anchor = wanted.partition("#")
        return any(f"/{page}.html#{anchor}" in link for link in first[query])

    missed = [query for query in QUERIES if not all(is_found(query, w) for w in QUERIES[query])]
    for questions, allowed in ((asked["first_time"], 0), (asked["forums"], 3)):
        wrong = [
            q for q, right in questions.items() if not any(is_found(q, w) for w in right.split())
        ]
        missed += wrong if len(wrong) > allowed else []
    assert {query: first[query] for query in missed} == {}


def test_search_knows_whole_words_and_names_of_code_come_last(visit):
    page = visit("search.html?q=ring").page
    titles = page.locator("#search-results li").all_inner_texts()
    assert titles and not any(
        "ring" not in text.lower().replace("string", "").replace("during", "")
        for text in titles[:3]
    )
    page = visit("search.html?q=Bucket").page
    links = page.locator("#search-results li a").evaluate_all("(all) => all.map((a) => a.href)")
    code = ["/code/shard" in link for link in links]
    assert any(code) and code == sorted(code)
