"""The pages of questions and examples: what they hold; the build treats them like lessons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from throwaway import HEADER, Book

from shardcourse import build
from shardlab.common import show

ROOT = show.ROOT
PAGES = {  # page: the least number of questions
    "questions_map": 6,
    "questions_one_gpu": 8,
    "questions_copies": 8,
    "questions_cuts": 8,
    "questions_together": 8,
}
EXAMPLES = [
    "book/gpt3_on_64_gpus",
    "book/your_job",
    "book/your_cluster",
]  # worked out behind a lesson, before the questions
CLAIMS = "book/claims"  # claims of others, run again; among the pages for reference
LEVELS = ("recall", "understanding", "application", "design", "design review")
QUESTION = re.compile(r"^## (\d+)\. (.+) \((.+)\)\n\n(.+?)\n\n<details", re.DOTALL)
SUMMARY = '<details class="answer"><summary>Answer to question {}</summary>\n'


def parts(page: str) -> list[str]:
    """The questions of a page, each with its answer."""
    text = (ROOT / f"book/{page}.md").read_text("utf-8")
    return re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("page", PAGES)
def test_questions_go_from_recall_to_design_and_each_answer_is_computed(page: str) -> None:
    found = parts(page)
    assert PAGES[page] <= len(found) <= 14
    levels = []
    for number, part in enumerate(found, 1):
        head = QUESTION.match(part)
        assert head and int(head[1]) == number
        assert "?" in head[4], head[2]
        levels.append(head[3])
        question, answer = part.split(SUMMARY.format(number))
        assert "code-cell" not in question and answer.rstrip().endswith("\n\n</details>")
        cells = re.findall(r"```{code-cell} ipython3\n(.*?)```", answer, re.DOTALL)
        assert len(cells) == 1 and re.search(r"^ *assert ", cells[0], re.MULTILINE), head[2]
    assert set(levels) <= set(LEVELS)
    assert levels[0] == "recall" and levels[-1].startswith("design")


def test_every_page_of_questions_ends_its_part() -> None:
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    listed = [[chapter["file"] for chapter in part["chapters"]] for part in contents["parts"]]
    ends = [part[-1] for part in listed if part[-1].startswith("book/questions_")]
    assert ends == [f"book/{page}" for page in PAGES]
    assert set(build.pages(ROOT)) == {*build.lessons(ROOT), *ends, *EXAMPLES, CLAIMS}
    assert CLAIMS in listed[-1]
    for example in EXAMPLES:
        (part,) = [part for part in listed if example in part]
        assert part.index(example) < part.index(part[-1])


@pytest.mark.parametrize("page", [*PAGES, "gpt3_on_64_gpus"])
def test_pages_start_no_ranks_and_reach_the_course_code_that_they_use(page: str) -> None:
    found = build.reach(f"book/{page}", ROOT).files
    text = (ROOT / f"book/{page}.md").read_text("utf-8")
    assert "ranks.run" not in text and ":tags: [measured]" not in text
    assert "code/shardlab/memory/step.py" in found
    assert not any(name.startswith("lessons/") for name in found)


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


def test_pages_are_the_lessons_and_the_notebooks_of_the_book(book: Book) -> None:
    fake = HEADER.replace("format_name: myst\n", "")
    book.write("book/other.md", fake + "# No notebook\n\n    format_name: myst\n")
    assert build.pages(book.root) == ["small", "book/questions"]
    assert build.lessons(book.root) == ["small"]
    assert build.selected([], book.root) == ["small"]
    with pytest.raises(ValueError, match="no such lesson: book/questions; allowed are small"):
        build.selected(["book/questions"], book.root)


def test_a_page_runs_in_its_own_folder_and_its_key_holds_what_it_reaches(book: Book) -> None:
    made = build.execute("book/questions", book.root)
    assert made.cells[0].outputs[0].text == "the answer is 42 beside it\n"
    assert build.changed(made, "book/questions", book.root) == []
    assert {"book/note.txt", "code/shardlab/second.py"} <= set(build.about(made)["files"])
    book.edit("book/questions.md", "answer()", "1 / 0")
    with pytest.raises(build.LessonError, match="^book/questions.md, code cell 1 of 1: Zero"):
        build.execute("book/questions", book.root)


def test_the_build_executes_such_a_page_when_what_it_reaches_changes(book: Book) -> None:
    book.built()
    assert book.executed == ["book/questions", "small"]
    page = book.page("book/questions")
    assert "the answer is 42 beside it" in page
    assert "lesson-outputs" not in page  # the line under the title is a lesson's
    assert page.count("<details") == page.count("</details>") == 1
    assert page.index("<details") < page.index("the answer is 42") < page.index("</details>")

    book.built()
    assert book.executed == []
    book.edit("book/note.txt", "beside", "next to")
    book.built()
    assert book.executed == ["book/questions"]
    assert "the answer is 42 next to it" in book.page("book/questions")
    downloads = {path.name for path in (book.root / "_build/html/downloads").rglob("*")}
    assert not any("questions" in name for name in downloads)
