"""Reading aids of a long page: folds with titles, a contents list that follows, search words."""

from __future__ import annotations

import re

import pytest

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


# Typical queries, each with a section that must be among the first three results.
QUERIES = {
    "OOM": ["out-of-memory-oom", "what-out-of-memory-looks-like"],
    "cuda out of memory": ["out-of-memory-oom", "what-out-of-memory-looks-like"],
    "MFU": ["low-mfu"],
    "FSDP": ["lessons/zero.html"],
    "ZeRO-3": ["lessons/zero.html"],
    "deadlock": ["term-hang", "a-hang"],
    "NCCL timeout": ["nccl-timeout", "a-hang"],
    "activation checkpointing": ["lessons/memory.html#recomputation"],
    "gradient checkpointing": ["lessons/memory.html#recomputation"],
    "all-reduce": ["term-all-reduce"],
    "ring attention": ["lessons/context_parallel.html", "term-ring-attention"],
    "long context": ["lessons/context_parallel.html"],
    "bubble": ["term-bubble", "lessons/pipeline.html"],
    "1F1B": ["lessons/pipeline.html"],
    "DDP": ["lessons/data_parallel.html"],
    "loss spike": ["the-loss-spikes"],
    "gradient accumulation": ["train.html#accumulation", "term-gradient-accumulation"],
    "resume on fewer GPUs": ["lessons/checkpoint.html"],
    "torchrun": ["term-torchrun", "lessons/cluster.html"],
    "row parallel bias": ["lessons/tensor_parallel.html"],
    "pipeline": ["lessons/pipeline.html"],
    "how many tokens fit": ["lessons/context_parallel.html#the-longest-context-that-fits"],
    "zero_grad": ["lessons/data_parallel.html"],
    # Sections that synonyms.yml puts first.
    "which gpu": ["cluster.html#device-numbers", "strategy.html#choosing"],
    "bf16": ["train.html#bf16"],
    "GQA": ["tensor_parallel.html#gqa", "memory.html#memory-of-a-hugging-face"],
}


def test_search_leads_to_sections(visit):
    search = visit("search.html")
    missed = {}
    for query in QUERIES:
        search.open_page(f"search.html?q={query.replace(' ', '+')}")
        results = search.page.locator("#search-results li a")
        links = results.evaluate_all("(all) => all.map((a) => a.href)")[:3]
        if not all(any(wanted in link for link in links) for wanted in QUERIES[query]):
            missed[query] = links
    assert missed == {}


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
