"""book/topics.yml: what is wrong in it is named; the map lays itself out; a new lesson builds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardcourse.build import index, lesson, pairs
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
        (1, {"needs": ["other"]}, "'second': needs or after 'other'"),
        (0, {"needs": ["second"]}, "'first': needs or after 'second'"),
        (1, {"requires": []}, "'second'.*'requires'"),
        (2, {"planned": False}, "'third': there is no lessons/third.md"),
        (1, {"planned": True}, "'second': it is planned, and lessons/second.md is there"),
    ],
)
def test_a_bad_entry_is_named(small: Path, place: int, change: dict, says: str) -> None:
    data = good()
    topics = data["parts"][0]["topics"]
    topics[place] |= change
    (small / index.TOPICS).write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match=says):
        index.read(small)


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

    last = "    pages: [book/questions_cuts]\n"
    entries = (copy / index.TOPICS).read_text().replace(last, ENTRY + last)
    (copy / index.TOPICS).write_text(entries)
    done = lesson.write("novelty", copy)
    assert "wrote lessons/novelty.md" in done and "wrote code/lessons/novelty.py" in done
    here = ENTRY.replace("        planned: true\n", "")
    assert (copy / index.TOPICS).read_text() == entries.replace(ENTRY, here)
    assert pairs.out_of_step(copy) == {}
    assert "- file: lessons/novelty\n" in (copy / "_toc.yml").read_text()
    assert 'href="../lessons/novelty.html"' in (copy / "figures/index_map.svg").read_text()
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
