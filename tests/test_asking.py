"""Questions to the reader: the place of a prediction's answer, and the parts of a quiz."""

from __future__ import annotations

import re

import pytest

from shardcourse import build
from shardcourse.build import quizzes, reading_time
from shardlab.common import show

ROOT = show.ROOT
FILES = [ROOT / f"lessons/{name}.md" for name in build.list_lessons(ROOT)]
FILES += sorted(ROOT.glob("book/*.md"))


def list_slugs(page):
    """Return the anchors of a page's headings, as MyST makes them."""
    text = re.sub(r"(?ms)^```.*?^```", "", (ROOT / page).read_text("utf-8"))
    return {reading_time.make_anchor(heading) for heading in re.findall(r"(?m)^##+ (.+)$", text)}


def test_what_a_quiz_explains_leads_to_a_section():
    text = (ROOT / quizzes.QUIZZES_FILE).read_text("utf-8")
    links = set(re.findall(r"\]\(\.\./(lessons/\w+\.md)#([^)]+)\)", text))
    assert len(links) > 20
    gone = [f"{page}#{slug}" for page, slug in links if slug not in list_slugs(page)]
    assert gone == []


def test_predictions_name_a_row_and_a_column_and_ask():
    found = 0
    for path in FILES:
        text = path.read_text("utf-8")
        for block in re.findall(r"(?ms)^```\{predict\}\n(.*?)^```\n\n(```\{code-cell\})?", text):
            found += 1
            form = r":row: \S.*\n:column: \S.*\n\n.*\?\n"
            assert re.fullmatch(form, block[0]) and block[1], (path.name, block[0])
    assert found >= 8


TABLE = (
    '<table class="table"><tr><th>ranks</th><th>held (GB)</th><th>of all (%)</th></tr>'
    "<tr><td>8</td><td>1,024.5</td><td>-</td></tr></table>"
)


def test_the_number_is_the_table_s_own(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book/_ext"))
    import directives

    assert directives.find_table_value(TABLE, "8", "held (GB)") == 1024.5
    for row, column in (("9", "held (GB)"), ("8", "held"), ("8", "of all (%)")):
        with pytest.raises(ValueError):
            directives.find_table_value(TABLE, row, column)
