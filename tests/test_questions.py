"""Pages of questions and examples: their contents; the build treats them like lessons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from throwaway import HEADER, Book

from shardcourse import build
from shardlab.common import show

ROOT = show.ROOT
CLAIMS = "book/claims"  # other people's claims, checked; one of the reference pages


def test_each_claim_is_judged_and_leads_to_the_cell_that_shows_it() -> None:
    text = (ROOT / f"{CLAIMS}.md").read_text("utf-8")
    table = re.findall("^" + 5 * r"\| (.+?) " + r"\|$", text, re.MULTILINE)[1:]
    assert len(table) >= 15
    sections = dict(re.findall(r"^##+ (.+?)\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE))
    for claim, source, verdict, found, shown in table:
        assert re.fullmatch(r"(tutorial|slides|lab|documentation), (20\d\d|undated)", source)
        assert verdict != "yes" and found, claim
        title, link = re.fullmatch(r"\[(.+)\]\((.+)\)", shown).groups()
        if link.startswith("#"):
            assert re.search(r"^ *assert |refused\(", sections[title], re.MULTILINE), claim
        else:
            page, _, anchor = link.partition("#")
            assert anchor and (ROOT / "book" / page).is_file(), claim


# --- The build of a small book with such a page -----------------------------------------------

PAGE = """\
# Questions

## 1. What is it? (recall)

What is the answer?

<details class="answer"><summary>Answer to question 1</summary>

It is computed.

```{code-cell} ipython3
from shardlab.first import answer

print("the answer is", answer(), open("note.txt").read())
```

</details>
"""


@pytest.fixture
def book(tmp_path: Path) -> Book:
    book = Book(tmp_path)
    book.write("book/questions.md", HEADER + PAGE)
    book.write("book/note.txt", "beside it")
    book.edit("_toc.yml", "  - file: book/execution\n", "  - file: book/questions\n")
    book.edit("_toc.yml", "questions\n", "questions\n  - file: book/execution\n")
    return book


def test_a_page_runs_in_its_own_folder_and_its_key_holds_what_it_reaches(book: Book) -> None:
    made = build.execute_page("book/questions", book.root)
    assert made.cells[0].outputs[0].text == "the answer is 42 beside it\n"
    assert build.list_outdated_reasons(made, "book/questions", book.root) == []
    assert {"book/note.txt", "code/shardlab/second.py"} <= set(build.get_metadata(made)["files"])
    book.edit("book/questions.md", "answer()", "1 / 0")
    with pytest.raises(build.LessonError, match="^book/questions.md, code cell 1 of 1: Zero"):
        build.execute_page("book/questions", book.root)


def test_the_build_executes_such_a_page_when_what_it_reaches_changes(book: Book) -> None:
    book.build_checked()
    assert book.executed_lessons == ["book/questions", "small"]
    page = book.read_page("book/questions")
    assert "the answer is 42 beside it" in page
    assert "lesson-outputs" not in page  # only lessons say where outputs come from
    assert page.count("<details") == page.count("</details>") == 1
    assert page.index("<details") < page.index("the answer is 42") < page.index("</details>")

    book.build_checked()
    assert book.executed_lessons == []
    book.edit("book/note.txt", "beside", "next to")
    book.build_checked()
    assert book.executed_lessons == ["book/questions"]
    assert "the answer is 42 next to it" in book.read_page("book/questions")
    downloads = {path.name for path in (book.root / "_build/html/downloads").rglob("*")}
    assert not any("questions" in name for name in downloads)
