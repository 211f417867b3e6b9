"""book/topics.yml: errors are named, and the generated files are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shardcourse.build import index
from shardtools import __main__


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a course of two lessons, with only the files that the index reads."""
    (tmp_path / "lessons").mkdir()
    (tmp_path / "book").mkdir()
    for name in ("lessons/first.md", "lessons/second.md", "book/page.md"):
        (tmp_path / name).write_text("# A page\n")
    return tmp_path


def make_course() -> dict:
    first = {"topic": "first", "title": "One", "able": "do it"}
    second = {**first, "topic": "second", "needs": ["first"]}
    parts = [{"part": "All", "topics": [first, second], "pages": ["book/page"]}]
    return {"parts": parts}


@pytest.mark.parametrize(
    ("place", "change", "says"),
    [
        (0, {"needs": ["second"]}, "'first': needs or after second"),
        (1, {"requires": []}, "'All'.*'requires'"),
        (1, {"topic": "other"}, "other, second: each lesson must have exactly one"),
    ],
)
def test_a_bad_entry_is_named(small: Path, place: int, change: dict, says: str) -> None:
    data = make_course()
    data["parts"][0]["topics"][place] |= change
    (small / index.TOPICS_FILE).write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match=says):
        index.read_index(small)


def test_what_is_out_of_step_is_named(small: Path, monkeypatch, capsys) -> None:
    (small / index.TOPICS_FILE).write_text(yaml.safe_dump(make_course()))
    mark = "<!-- topics: {} -->\n<!-- end -->\n"
    (small / "_toc.yml").write_text("")
    (small / "README.md").write_text("before\n" + mark.format("lessons") + "after\n")
    (small / "book/index.md").write_text(mark.format("begin"))
    with pytest.raises(ValueError, match="index.md: add the lines <!-- topics: map --> … <!-- end"):
        index.generate_files(small)
    (small / "book/index.md").write_text(mark.format("begin") + mark.format("map"))

    monkeypatch.chdir(small)
    assert __main__.main(["pairs", "--check"]) == 1
    told = capsys.readouterr().out
    assert "_toc.yml differs from its source: run `make pairs`" in told
    assert "book/index.md differs" in told
    assert __main__.main(["pairs"]) == __main__.main(["pairs", "--check"]) == 0
    text = (small / "README.md").read_text()
    assert text.startswith("before\n<!-- ") and text.endswith(" -->\nafter\n")
    assert "\n- [One](lessons/first.md): do it.\n" in text


def test_every_path_keeps_to_what_it_promises(root: Path) -> None:
    for way in index.read_index(root).learning_paths.values():
        for sitting in way.sessions:
            spent = sitting.read_minutes + (0 if way.reading else sitting.exercise_minutes)
            assert abs(spent - sitting.minutes) <= 0.1 * sitting.minutes, (way.title, sitting.name)
