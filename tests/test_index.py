"""book/topics.yml: what is wrong in it is named; the map lays itself out; a new lesson builds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardcourse.build import index, lesson, pairs, paths
from shardtools import __main__


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A course of two lessons and a planned one, with nothing but what the index looks at."""
    (tmp_path / "lessons").mkdir()
    (tmp_path / "book").mkdir()
    for name in ("lessons/first.md", "lessons/second.md", "book/page.md"):
        (tmp_path / name).write_text("# A page\n")
    return tmp_path


def good() -> dict:
    first = {"topic": "first", "title": "One", "able": "do it"}
    second = {**first, "topic": "second", "needs": ["first"]}
    third = {**first, "topic": "third", "after": ["second"], "planned": True}
    parts = [{"part": "All", "topics": [first, second, third], "pages": ["book/page"]}]
    return {"parts": parts}


@pytest.mark.parametrize(
    ("place", "change", "says"),
    [
        (1, {"needs": ["other"]}, "'second': needs or after 'other': .* what comes before"),
        (0, {"needs": ["second"]}, "'first': needs or after 'second'"),
        (1, {"after": ["first"]}, "'second': needs or after 'first': allowed is, once"),
        (1, {"topic": "first"}, "'first': it stands there twice"),
        (
            1,
            {"requires": []},
            "'second'.*unexpected keyword argument 'requires'; known are topic, title",
        ),
        (1, {"able": None}, "'second'.*missing 1 required positional argument: 'able'"),
        (1, {"module": "third_one"}, "'second': module='third_one': allowed is the module of"),
        (2, {"planned": False}, "'third': there is no lessons/third.md, and it is not `planned"),
        (1, {"planned": True}, "'second': it is planned, and lessons/second.md is there"),
        (2, {"topic": "Third-One"}, "'Third-One': a name is of lower-case words, joined by _"),
        (2, None, "topics.yml: a word: .*known are topic"),
    ],
)
def test_a_bad_entry_is_named(small: Path, place: int, change: dict | None, says: str) -> None:
    data = good()
    topics = data["parts"][0]["topics"]
    topics[place] = "a word" if change is None else {**topics[place], **change}
    (small / index.TOPICS).write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match=says):
        index.read(small)


def test_what_can_wait_is_sections_of_its_page(small: Path) -> None:
    data = good()
    later = data["parts"][0]["topics"][0]["later"] = {"the-core": "its code", "more": "more"}

    def pages() -> dict[str, paths.Page]:
        (small / index.TOPICS).write_text(yaml.safe_dump(data, sort_keys=False))
        return index.pages(index.read(small), small)

    with pytest.raises(ValueError, match="'first': later 'the-core': allowed are addresses"):
        pages()
    with open(small / "lessons/first.md", "a") as lesson:
        lesson.write("\n## The core\n\n### Within\n\n## More\n\n" + "word " * 299 + "\n\n## End\n")
    page = pages()["first"]
    assert page.read == 2 and page.first < 0.1
    assert [page.onward(name).title for name in later] == ["End", "End"]
    later["within"] = "stands in the core"
    with pytest.raises(ValueError, match="'first': later 'within': .* each once"):
        pages()


def test_a_file_without_an_entry_and_a_page_without_a_file_are_named(small: Path) -> None:
    data = good()
    (small / index.TOPICS).write_text(yaml.safe_dump(data))
    assert [topic.title for topic in index.read(small).here] == ["One", "One"]
    (small / "book/page.md").unlink()
    with pytest.raises(ValueError, match="page 'book/page': there is no book/page.md"):
        index.read(small)
    (small / "lessons/fourth.md").write_text("# Four\n")
    with pytest.raises(ValueError, match="lessons without a topic: fourth"):
        index.read(small)


def test_what_is_out_of_step_is_named(root: Path, small: Path, monkeypatch, capsys) -> None:
    (small / index.TOPICS).write_text(yaml.safe_dump(good()))
    (small / "figures").mkdir()
    shutil.copy(root / "figures/index.py", small / "figures")
    mark = "<!-- topics: {} -->\n<!-- end -->\n"
    (small / "_toc.yml").write_text("")
    (small / "README.md").write_text("before\n" + mark.format("lessons") + "after\n")
    (small / "book/index.md").write_text(mark.format("map"))
    with pytest.raises(ValueError, match="index.md: wanted is <!-- topics: table --> … <!-- e"):
        index.made(small)
    (small / "book/index.md").write_text(mark.format("map") + mark.format("table"))

    monkeypatch.chdir(small)
    assert __main__.main(["pairs", "--check"]) == 1
    told = capsys.readouterr().out
    assert "_toc.yml differs from book/topics.yml: run `make pairs`" in told
    assert "figures/index_map.svg differs from book/topics.yml" in told
    assert __main__.main(["pairs"]) == __main__.main(["pairs", "--check"]) == 0
    text = (small / "README.md").read_text()
    assert text.startswith("before\n<!-- ") and text.endswith(" -->\nafter\n")
    assert "\n- [One](lessons/first.md): do it.\n" in text and "third" not in text


BOXES = """\
# One

## Its cost: 8 × 4

```{code-cell} ipython3
## Not a heading
```

````{admonition} Checked: "it costs nothing"
:class: checked

It does. ```{admonition} Checked: "not a box"```
````

### And `more`, again

```{admonition} Checked: "more is better"
:class: checked
```
"""


def test_the_page_of_claims_lists_every_box_with_its_section(small: Path) -> None:
    (small / index.TOPICS).write_text(yaml.safe_dump(good()))
    (small / "lessons/first.md").write_text(BOXES)
    (small / "book/page.md").write_text(BOXES.replace("more is", "less is"))
    assert index._checked(index.read(small), small) == [
        "**[One](../lessons/first.md)**",
        "",
        '- ["it costs nothing"](../lessons/first.md#its-cost-8--4)',
        '- ["more is better"](../lessons/first.md#and-more-again)',
        "",
        "**[One](page.md)**",
        "",
        '- ["it costs nothing"](page.md#its-cost-8--4)',
        '- ["less is better"](page.md#and-more-again)',
    ]


def test_the_list_of_claims_is_made_where_there_is_such_a_page(root: Path) -> None:
    boxes = [
        box
        for page in (*root.glob("lessons/*.md"), *root.glob("book/*.md"))
        for box in re.findall(r"^`{3,}{admonition} Checked: (.+)$", page.read_text(), re.MULTILINE)
    ]
    listed = index.made(root)[root / index.CLAIMS].partition("<!-- topics: checked -->")[2]
    assert len(boxes) > 50 and listed.count("\n- [") == len(boxes)
    assert all(f"- [{box}](" in listed for box in boxes)


WAY = """\
- path: short
  title: Short
  whom: who hurries
  able: do it
  sittings:
    - name: Morning
      minutes: 5
      parts:
        - {page: first, sections: [reading], exercises: [1]}
        - {page: second, sections: []}
    - name: Evening
      minutes: 5
      parts:
        - {page: first, sections: [below]}
        - book/page
"""
LESSON = (
    """\
# One: a lesson

Five words stand before it.

## Reading

"""
    + "word " * 449
    + """

```{code-cell} ipython3
a = 1

b = 2
```

```{code-cell} ipython3
:tags: [hide-input]

# Not counted
c = 3
```

### Below

"""
    + "word " * 149
    + """

## Exercises

```{exercise-start} First (easy)
:label: a
```
Not counted.
```{exercise-end}
```
```{exercise-start} Second (hard)
:label: b
```
```{exercise-end}
```
"""
)


def test_minutes_of_a_path_are_made_from_its_parts(small: Path) -> None:
    (small / "lessons/first.md").write_text(LESSON)
    (small / paths.PATHS).write_text(WAY)
    data = good()
    data["parts"][0]["topics"][0]["exercises"] = 20
    (small / index.TOPICS).write_text(yaml.safe_dump(data))
    course = index.read(small)
    way = index.ways(course, small, index.pages(course, small))["short"]
    morning, evening = way.sittings
    # 5 + 450 + 150 words and 2 lines; a quarter of 20 minutes
    assert [(piece.read, piece.solve) for piece in morning.pieces] == [(4, 5), (0, 0)]
    assert [piece.read for piece in evening.pieces] == [1, 0]
    assert [piece.begins for piece in evening.pieces] == ["Below", ""]
    table = "\n".join(paths.table(way, project=False))
    assert "| **Morning** | [One](../lessons/first.md): [Reading](" in table
    assert "**10 min**" in table
    left = {
        docname: [(sitting.name, piece and piece.docname) for _, sitting, piece in steps]
        for docname in ("lessons/first", "lessons/second", "book/page")
        if (steps := paths.onward({"short": way}, docname))
    }
    assert left == {
        "lessons/first": [("Morning", "lessons/second"), ("Evening", "book/page")],
        "lessons/second": [("Morning", "lessons/first")],
        "book/page": [("Evening", None)],
    }
    for old, new, says in (
        ("[reading]", "[nowhere]", "'first': no section 'nowhere': allowed are reading, below"),
        ("page: second", "page: third", "page 'third': allowed are lessons"),
        ("exercises: [1]", "exercises: [3]", r"exercises \[3\]: it has 2"),
        ("exercises: [1]", "exercise: [1]", "known are page, sections, exercises"),
        ("whom: who", "who: who", "unexpected keyword argument 'who'"),
    ):
        (small / paths.PATHS).write_text(WAY.replace(old, new))
        with pytest.raises(ValueError, match=f"book/paths.yml: path 'short': .*{says}"):
            index.ways(course, small, index.pages(course, small))


def test_every_path_keeps_to_what_it_promises(root: Path) -> None:
    course = index.read(root)
    for way in index.ways(course, root, index.pages(course, root)).values():
        for sitting in way.sittings:
            spent = sitting.read + (0 if way.reading else sitting.solve)
            assert abs(spent - sitting.minutes) <= 0.1 * sitting.minutes, (way.title, sitting.name)


ENTRY = """\
      - topic: novelty
        title: A novelty
        able: do what nobody did
        needs: [collectives]
        planned: true
"""


def test_a_new_lesson_builds(root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Its skeleton passes lint, the house's tests and its own, and stands on the map.

    With --whole its page is built, too.
    """
    copy = tmp_path / "course"
    left = shutil.ignore_patterns("_build", "lab", ".venv", ".git", ".*_cache", "__pycache__")
    shutil.copytree(root, copy, ignore=left)

    def run(tool: str, *arguments: str) -> None:
        command = [Path(sys.executable).parent / tool, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(copy / "code"), "RECORDED": "0"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def refused(why: str) -> None:
        before = sorted(copy.rglob("*"))
        with pytest.raises(ValueError, match=f"topic='novelty': {why}"):
            lesson.write("novelty", copy)
        assert sorted(copy.rglob("*")) == before

    refused("allowed are the planned ones.*write an entry with `planned: true` into book/topics")
    last = "    pages: [book/questions_cuts]\n"
    entries = (copy / index.TOPICS).read_text().replace(last, ENTRY + last)
    (copy / index.TOPICS).write_text(entries)
    (copy / "code/shardlab/novelty").mkdir()
    refused("code/shardlab/novelty is there already")
    (copy / "code/shardlab/novelty").rmdir()

    done = lesson.write("novelty", copy)
    assert "wrote lessons/novelty.md" in done and "wrote code/lessons/novelty.py" in done
    here = ENTRY.replace("        planned: true\n", "")
    assert (copy / index.TOPICS).read_text() == entries.replace(ENTRY, here)
    assert pairs.out_of_step(copy) == {}
    assert "- file: lessons/novelty\n" in (copy / "_toc.yml").read_text()
    assert 'href="../lessons/novelty.html"' in (copy / "figures/index_map.svg").read_text()
    refused("allowed are the planned ones")
    run("ruff", "format", "--check", ".")
    run("ruff", "check", ".")
    run("codespell")
    tests = ("tests/test_novelty.py", "tests/test_house.py")
    run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", "novelty")

    if not request.config.getoption("--whole"):
        return
    toc = "format: jb-book\nroot: book/execution\nchapters:\n  - file: lessons/novelty\n"
    (copy / "_toc.yml").write_text(toc)
    for room in ("tests", "benchmarks"):  # every source file would get a page
        shutil.rmtree(copy / room)
    run("jupyter-book", "build", "-W", "-n", "--keep-going", ".")
    page = (copy / "_build/html/lessons/novelty.html").read_text()
    assert "equal on 1, 2 and 4 ranks" in page
    assert "✗ Rank 0 returned None" in page and "✓ Equal to the mean of one process" in page
