"""Rules that turn a page into slides, on pages of a few lines."""

from __future__ import annotations

import sys

from bs4 import BeautifulSoup

from shardcourse.build import paths
from shardlab.common import show

sys.path.append(str(show.ROOT / "book/_ext"))
import deck
from slides import mark_paths, render_deck

CELL = (
    '<div class="cell {tags}"><div class="cell_input"><pre>{code}</pre></div>'
    '<div class="cell_output"><div class="output stream"><pre>{out}</pre></div></div></div>'
)
TABLE = (
    '<div class="cell tag_hide-input"><details><summary><p>Table: bytes</p></summary>'
    '<div class="cell_input"><pre>rows = 1</pre></div></details><div class="cell_output"><div>'
    '<table class="table"><thead><tr><th>stage</th><th>held (MB)</th></tr></thead><tbody>'
    "<tr><td>one</td><td>12.5</td></tr></tbody></table></div></div></div>"
)
EXERCISE = (
    '<div class="exercise"><p class="admonition-title"><span class="caption-number">1</span>'
    ': Bytes</p><div class="cell"><div class="cell_input"><pre>check(answer, "bytes")</pre></div>'
    "</div></div>"
)


def make_deck(*sections: str, opening: str = "") -> list[deck.Slide]:
    body = "".join(f'<section id="s{n}">{one}</section>' for n, one in enumerate(sections))
    page = f"<section><h1>A lesson</h1>{opening}{body}</section>"
    parsed = BeautifulSoup(page, "html.parser")
    return deck.make_slides(parsed, {"bytes": ["a mistake in bytes"]})


def make_cell(lines: int, tags: str = "", out: str = "") -> str:
    code = "\n".join(f"x{n} = {n}" for n in range(lines))
    return CELL.format(tags=tags, code=code, out=out)


def test_a_table_s_numbers_come_with_the_next_step_and_its_labels_before():
    (_, made) = make_deck(f"<h2>Bytes</h2>{TABLE}<p>Stage one holds the least of all.</p>")
    assert "<td>one</td>" in made.body
    assert '<td class="fragment" data-fragment-index="0">12.5</td>' in made.body
    assert made.ask.startswith("what will stand there?")
    assert "Stage one holds" in "".join(made.notes)


def test_a_question_of_the_page_is_the_slide_s():
    asked = '<div class="predict"><p class="predict-title">Predict first</p><p>How many MB?</p>'
    asked += f'<div class="predict-answer">{TABLE}</div></div>'
    (_, made) = make_deck(f"<h2>Bytes</h2><p>Each rank holds a share of them.</p>{asked}")
    assert made.ask == "How many MB?" and '<p class="lead">How many MB?' in made.body
    assert 'data-fragment-index="0">12.5</td>' in made.body


def test_code_comes_before_what_it_printed_and_long_code_stays_on_the_page():
    check = make_cell(1, "tag_hide-input", out="right 42")
    for cells in (make_cell(5, out="right 42"), f"{make_cell(5)}<p>It is right:</p>{check}"):
        (_, short) = make_deck(f"<h2>Code</h2>{cells}")
        assert short.body.index("x4 = 4") < short.body.index('class="out fragment"')
        assert "right 42</pre>" in short.body and "print" in short.ask
    said = "<p>A paragraph that says enough here, of ranks and of what they send to each other.</p>"
    (_, told) = make_deck(f"<h2>Code</h2>{said}{make_cell(30)}")
    assert told.kind == "text" and "says enough" in told.body and "x4" not in told.body


def test_a_claim_s_verdict_comes_with_the_next_step_without_what_stands_elsewhere():
    said = "<p>A cell counts it. A fifth is left (row 2).\nIt is small.\nA row has it. Or not.</p>"
    title = '<p class="admonition-title">Only if it fits: “so it is”</p>'
    (_, made) = make_deck(f'<h2>One</h2><div class="admonition checked">{title}{said}</div>')
    shown, answer = made.body.split('<p class="ask">')
    assert "“so it is”" in shown and "Only if" not in shown and "fragment" in answer
    assert answer.endswith("<strong>Only if it fits.</strong> A fifth is left. It is small.</p>")


def test_tags_overrule_the_rule():
    both = f"{TABLE}<p>Something else stands between.</p>{{}}"
    (_, *made) = make_deck(f"<h2>One</h2>{both.format(make_cell(5) * 2)}")
    assert [slide.kind for slide in made] == ["table", "code"] and "print" not in made[1].ask
    skipped = make_deck(f"<h2>One</h2>{both.format(make_cell(5, 'tag_skip-slide'))}")
    assert [s.kind for s in skipped] == ["title", "table"]
    many = [f"<h2>Number {n}</h2>{TABLE}" for n in range(40)]
    tagged = make_deck(*many, f"<h2>One</h2>{TABLE}{make_cell(5, 'tag_slide')}")
    assert "code" in [s.kind for s in tagged]
    (_, *made) = make_deck(f"<h2>One</h2>{TABLE}{make_cell(5, 'tag_slide')}")
    assert [slide.kind for slide in made] == ["table", "code"]  # no tag displaces the table


def test_a_deck_has_at_most_so_many_slides_and_its_notes_all_of_the_prose():
    sections = [f"<h2>Number {n}</h2><p>What is said {n} times over.</p>{TABLE}" for n in range(40)]
    made = make_deck(*sections, f"<h2>Exercises</h2>{EXERCISE}", opening="<p>It begins.</p>")
    assert len(made) == deck.MAX_SLIDES
    notes = "".join(one for slide in made for one in slide.notes)
    assert all(f"said {n} times" in notes for n in range(40))
    assert "It begins." in notes and "<li>a mistake in bytes</li>" in notes
    assert "<li>Bytes</li>" in made[-1].body
    html = render_deck(made, "../lessons/a.html", "../")
    assert html.count("<section") == len(made) and html.count('class="notes"') == len(made)


def test_a_slide_knows_the_paths_that_come_to_it():
    made = make_deck(f"<h2>Bytes</h2>{TABLE}", f"<h2>A <code>sum</code>, whole</h2>{TABLE}")
    some = paths.Segment("a", "A", [("a-sum-whole", "A `sum`, whole")], [], 1, 0)
    every = paths.Segment("a", "A", [], [], 1, 0)
    mark_paths(made, [("all", every), ("some", some), ("some", some)])
    assert [slide.paths for slide in made] == [["all", "some"], ["all"], ["all", "some"]]
    assert 'data-paths="all some"' in render_deck(made, "a.html", "../")


def test_what_is_too_large_for_a_hall_is_not_shown():
    assert deck.fit_code_font(["short = 1"], 400) == 28
    assert deck.fit_code_font(["x" * 120], 400) == 0
    assert deck.fit_code_font(["a = 1"] * 40, 600) == 0
    assert deck.fit_table_font([["what", "MB"], *[[f"part {n}", "1"] for n in range(4)]], 460) == 28
    assert deck.fit_table_font([["what", "MB"], ["x" * 120, "1"]], 460) == 0
    for high, shown in ((900, ""), (450, "picture tall"), (150, "picture")):
        drawn = f'<p><svg viewbox="0 0 300 {high}"><text style="font-size: 9px">a</text></svg></p>'
        made = deck.render_picture(deck.Block("figure", BeautifulSoup(drawn, "html.parser")), 500)
        assert [*made.split('"'), ""][1] == shown


def test_a_picture_keeps_its_ids_and_the_notes_keep_formulas():
    drawn = '<p><i class="inline-svg"><svg viewbox="0 0 4 2"><use id="a" href="#a"/></svg></i></p>'
    said = r'<p id="b">It is <i class="math">\(\frac{1}{2}\)</i>.</p>'
    (_, made) = make_deck(f"<h2>One</h2>{drawn}{said}")
    assert '<use href="#a" id="a">' in made.body and r">\frac{1}{2}<" in made.notes[-1]
