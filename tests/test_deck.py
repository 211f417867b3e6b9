"""The rule by which a page becomes slides, on pages of a few lines."""

from __future__ import annotations

import sys

import pytest

from shardcourse.build import paths
from shardlab.common import show

sys.path.append(str(show.ROOT / "book/_ext"))
import deck
import deck_page
from slides import document, mark

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


def slides(*sections: str, opening: str = "") -> list[deck.Slide]:
    """The slides of a page with these sections."""
    body = "".join(f'<section id="s{n}">{one}</section>' for n, one in enumerate(sections))
    page = f"<article><section><h1>A lesson</h1>{opening}{body}</section></article>"
    return deck.deck(deck_page.Page(page), lambda exercise: [])


def cell(lines: int, tags: str = "", out: str = "") -> str:
    code = "\n".join(f"x{n} = {n}" for n in range(lines))
    return CELL.format(tags=tags, code=code, out=out)


def test_a_table_s_numbers_come_with_the_next_step_and_its_labels_before():
    prose = "<p>Each rank holds a share of them.</p>{}<p>Stage one holds the least of all.</p>"
    (_, made) = slides(f"<h2>Bytes</h2>{prose.format(TABLE)}")
    assert "<td>one</td>" in made.body
    assert '<td class="fragment" data-fragment-index="0">12.5</td>' in made.body
    assert '<p class="lead">Each rank holds' in made.body
    assert 'data-fragment-index="0">Stage one holds' in made.body
    assert "held (MB)" in made.ask


def test_a_question_of_the_page_is_the_slide_s():
    asked = '<div class="predict"><p class="predict-title">Predict first</p><p>How many MB?</p>'
    asked += f'<div class="predict-answer">{TABLE}</div></div>'
    (_, made) = slides(f"<h2>Bytes</h2><p>Each rank holds a share of them.</p>{asked}")
    assert made.ask == "How many MB?" and '<p class="lead">How many MB?' in made.body
    assert 'data-fragment-index="0">12.5</td>' in made.body


def test_code_comes_before_what_it_printed_and_long_code_stays_on_the_page():
    (_, short) = slides(f"<h2>Code</h2>{cell(5, out='right 42')}")
    assert short.body.index("x4 = 4") < short.body.index("right 42")
    assert 'class="out fragment"' in short.body
    (_, told) = slides(f"<h2>Code</h2><p>A sentence that says enough here, or there.</p>"
                       "<p>It leans on that sentence, and stays with it.</p>"
                       "<p>Why is that? It is so, and no other way.</p>"
                       "<p>A rank keeps its own share alone. It sends the rest to others.</p>"
                       f"<p>This costs three things.</p>{cell(30)}")  # fmt: skip
    assert told.kind == "text" and told.body.count("<li>") == 2
    assert "its own share alone" in told.body and "the rest to others" in told.body
    assert "says enough here" not in told.body and "says enough here" in "".join(told.notes)


@pytest.mark.parametrize(
    ("after", "claim"),
    [
        ("<p>Why are they of one size? Each rank holds a quarter.</p>", ""),
        (
            "<p>Why are they of one size? It is so. Each rank holds one of them.</p>",
            "Each rank holds",
        ),
        ("<p>This costs three things. The copy takes host memory.</p>", "The copy takes"),
        ("<p>It is the least of all of them.</p>", "It is the least"),
        ("<p>What is that, for one rank? It is the least of all of them.</p>", ""),
        ("<p><strong>Another order.</strong> Rank 1 begins with broadcast.</p>", ""),
        ('<div class="math">\\[ a = b,\nc = d + e + f + g + h + i .\\]</div>', ""),
    ],
)
def test_what_a_slide_says_of_its_table_is_said_of_it(after, claim):
    (_, made) = slides(f"<h2>Bytes</h2>{TABLE}{after}")
    assert (claim in made.body) if claim else ("claim" not in made.body)


def test_what_a_cell_says_of_its_table_is_the_caption():
    (_, made) = slides(f"<h2>Held</h2>{TABLE}")
    assert "<caption>bytes</caption>" in made.body
    (_, made) = slides(f"<h2>Bytes</h2>{TABLE}")
    assert "<caption>" not in made.body  # the heading says it


def test_a_table_is_as_large_as_the_slide_lets_it():
    rows = "".join(f"<tr><td>all the parts {n}</td><td>{n}</td></tr>" for n in range(8))
    assert (
        deck_page.table_size(f"<table><tr><th>what</th><th>MB</th></tr>{rows}</table>", 460) == 28
    )


def test_a_solution_is_shown_without_its_check():
    code = "<pre>answer <span>=</span> 3\n<span>check</span>(answer, &quot;a&quot;)\n</pre>"
    one = deck_page.Exercise("A", "How many?", "a", True, code, "")
    made = deck.question(one, [])
    assert "answer" in made.body and "check" not in made.body


def test_tags_overrule_the_rule():
    both = f"{TABLE}<p>Something else stands between.</p>{{}}"
    plain = [s.kind for s in slides(f"<h2>One</h2>{both.format(cell(5))}")]
    assert plain == ["title", "table", "code"]
    skipped = slides(f"<h2>One</h2>{both.format(cell(5, 'tag_skip-slide'))}")
    assert [s.kind for s in skipped] == ["title", "table"]
    many = "".join(f"<h2>Section {n}</h2>{TABLE}{{{n}}}" for n in range(1))
    tagged = slides(many.format(cell(5, "tag_slide")))
    assert "code" in [s.kind for s in tagged]


def test_a_deck_has_at_most_so_many_slides_and_its_notes_all_of_the_prose():
    sections = [f"<h2>Number {n}</h2><p>What is said {n} times over.</p>{TABLE}" for n in range(40)]
    made = slides(*sections, opening="<p>It begins with one thing.</p>")
    assert len(made) <= deck.MOST
    notes = "".join(one for slide in made for one in slide.notes)
    assert all(f"said {n} times" in notes for n in range(40))
    assert "It begins with one thing." in notes
    html = document(made, "../lessons/a.html", "../")
    assert html.count("<section") == len(made) and html.count('class="notes"') == len(made)


def test_a_slide_knows_the_paths_that_come_to_it():
    made = slides(f"<h2>Bytes</h2>{TABLE}", f"<h2>A <code>sum</code>, whole</h2>{TABLE}")
    some = paths.Piece("a", "A", [("a-sum-whole", "A `sum`, whole")], [], 1, 0)
    mark(made, [("all", paths.Piece("a", "A", [], [], 1, 0)), ("some", some), ("some", some)])
    assert [slide.ways for slide in made] == [["all", "some"], ["all"], ["all", "some"]]
    assert 'data-paths="all some"' in document(made, "a.html", "../")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("One thing. Another\nthing is <em>this. And</em> that.", 2),
        ('Rank <span class="math">\\(r. S\\)</span> sends.\nDone', 2),
    ],
)
def test_sentences_end_where_their_tags_do(text, wanted):
    found = deck_page.sentences(text)
    assert len(found) == wanted and all(one.count("<") % 2 == 0 for one in found)


def test_what_is_too_large_for_a_hall_is_not_shown():
    assert deck_page.code_size("<pre>short = 1\n</pre>", 400) == 28
    assert deck_page.code_size(f"<pre>{'x' * 120}</pre>", 400) == 0
    assert deck_page.code_size("<pre>" + "a = 1\n" * 21 + "</pre>", 900) == 0
    tall = '<svg viewBox="0 0 300 900"><text style="font-size: 9px">a</text></svg>'
    wide = '<svg viewBox="0 0 300 150"><text style="font-size: 9px">a</text></svg>'
    assert deck_page.drawn(tall, 500) is None
    assert deck_page.drawn(wide, 500).text > 20
