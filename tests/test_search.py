"""The search's script, run by node over the lessons' sections; tests/site has a browser."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import yaml
from docutils.core import publish_doctree
from myst_parser.parsers.docutils_ import Parser

from shardlab.common import show

# The little of a browser that the script asks for; it prints results and summary.
PAGE = """
const made = () => ({ textContent: "", children: [], appendChild(one) {
  this.children.push(one); this.textContent += one.textContent; return one; } });
const parts = { "#search-results": made(), ".search-summary": made() };
globalThis.window = { SECTIONS: JSON.parse(require("fs").readFileSync(process.argv[1], "utf-8")) };
globalThis.location = { search: "?" + new URLSearchParams({ q: process.argv[2] }) };
globalThis.document = { createElement: made, querySelectorAll: () => [],
  querySelector: (name) => parts[name] };
require(process.argv[3]);
const links = parts["#search-results"].children.map((item) => item.children[0].href);
const summary = parts[".search-summary"];
console.log(JSON.stringify({ links, said: summary.textContent,
  away: summary.children.flatMap((one) => one.href ?? []) }));
"""


@pytest.fixture(scope="module")
def said():
    """What book/synonyms.yml holds."""
    return yaml.safe_load((show.ROOT / "book/synonyms.yml").read_text("utf-8"))


@pytest.fixture(scope="module")
def ask(said, tmp_path_factory):
    """A function that searches the lessons that have sections which come first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(show.ROOT / "book/_ext"))
        import search
    settings = {"report_level": 5, "myst_heading_anchors": 3, "myst_suppress_warnings": ["myst"]}
    entries, slugs = [], {}
    for name in sorted({link.split(".md#")[0] for link in said["taught"]}):
        text = (show.ROOT / f"{name}.md").read_text("utf-8")
        tree = publish_doctree(text, parser=Parser(), settings_overrides=settings)
        slugs[name] = tree.myst_slugs
        found = list(search.sections(tree))
        entries += [[found[0][1], title, f"{name}.html#{at}", prose] for at, title, prose in found]
    first = search.taught(said["taught"], slugs, lambda docname: f"{docname}.html")
    assert {address for address, _ in first} <= {address for *_, address, _ in entries}
    with pytest.raises(ValueError, match="'lessons/train.md#gone' in synonyms.yml is no heading"):
        search.taught({"lessons/train.md#gone": ["x"]}, slugs, str)
    index = tmp_path_factory.mktemp("search") / "sections.json"
    index.write_text(json.dumps({"entries": entries, **said, "taught": first}), "utf-8")

    def ask(query):
        if not (node := shutil.which("node")):
            pytest.skip("no node here")
        script = show.ROOT / "book/static/search.js"
        command = [node, "-e", PAGE, index, query, script]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    return ask


@pytest.mark.parametrize(
    ("query", "wanted"),
    {
        "gradient accumulation": ["train.html#accumulation"],
        "FSDP": ["zero.html#fsdp2", "train.html#fsdp2"],
        "which GPU": ["cluster.html#which-gpu", "strategy.html#choosing"],
        "bf16": ["train.html#bf16"],
        "GQA": ["tensor_parallel.html#today", "memory.html#a-model-of-today"],
        "head_dim": ["tensor_parallel.html#today", "memory.html#a-model-of-today"],
    }.items(),
)
def test_a_phrase_leads_to_where_it_is_taught(ask, query, wanted):
    for asked in (query, query.lower()):
        found = ask(asked)
        for piece, link in zip(wanted, found["links"], strict=False):
            assert f"lessons/{piece}" in link, found["links"][:3]
        assert len(found["links"]) == len(set(found["links"])) >= len(wanted)
        assert found["said"].endswith(f"sections for “{asked}”.") and not found["away"]


def test_more_than_the_phrase_is_searched_as_ever(ask):
    found = ask("bf16 masters of a shard")
    assert found["links"] and "#bf16" not in found["links"][0]


def test_adam_finds_the_sections_on_adamw_which_is_another_word(ask):
    wanted = ask("AdamW")["links"][:5]
    assert len(wanted) == 5 and set(wanted) <= set(ask("Adam")["links"])


def test_what_the_course_lacks_is_said_with_a_link(ask, said):
    (entry,) = said["elsewhere"]
    for query in ("LoRA", "what is lora"):
        found = ask(query)
        assert found["said"].startswith("LoRA is not in this course. See Hugging Face PEFT.")
        assert found["away"] == [entry["link"]]
    found = ask("xylophone")
    assert found["said"].startswith("Nothing has “xylophone” in it. Fewer words")
    assert found["links"] == found["away"] == []
