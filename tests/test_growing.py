"""A script that grows: its steps, its pages, its errors."""

from __future__ import annotations

import pytest

from shardlab.show.growing import Growing

SOURCE = '''\
#: steps one two three
"""A script."""

import math  #: two


def main():
    a = 1  #: -three
    #: three
    a = 3
    #: two
    b = math.floor(a)
    #: end
    return a


def more():  #: two -three
    return 2  #: two -three
'''


@pytest.fixture
def script(tmp_path):
    (tmp_path / "core.py").write_text(SOURCE)
    return Growing(tmp_path / "core.py")


def test_a_step_has_its_lines_without_their_marks(script):
    assert script.steps == ["one", "two", "three"]
    assert "#:" not in "".join(map(script.text, script.steps))
    assert "math" not in script.text("one") and "import math\n" in script.text("two")
    assert [script.load(step).main() for step in script.steps] == [1, 1, 3]
    assert [hasattr(script.load(step), "more") for step in script.steps] == [False, True, False]


def test_changes_are_those_to_the_step_before(script):
    text = script.changes("three").text
    lines = [line for line in text.splitlines() if line[:1] in ("+", "-")]
    assert lines == ["-     a = 1", "+     a = 3", "- def more():", "-     return 2"]
    assert "def more" not in script.changes("three", "main").text
    page = script.changes("two").html
    assert page.count("+ ") == 4 and "<a" not in page  # this file is not the course's
    assert "a = 1" in script.show("one", "main").text and "a = 3" not in script.show("one").text


def test_what_is_seen_is_counted_in_lines_of_the_source(script):
    lines = SOURCE.splitlines()
    assert [lines[n - 1].split("  #")[0] for n in script.seen("two", "more")][0] == "def more():"
    seen = [lines[n - 1] for n in script.seen("three", changes=True)]
    assert "    a = 3" in seen and "    a = 1  #: -three" not in seen


def test_a_traceback_shows_the_steps_own_line(script, tmp_path):
    (tmp_path / "bad.py").write_text("#: steps one\ndef main():\n    raise KeyError('here')\n")
    import traceback

    with pytest.raises(KeyError) as error:
        Growing(tmp_path / "bad.py").load("one").main()
    assert traceback.extract_tb(error.tb)[-1].line == "raise KeyError('here')"


def test_bad_input_is_named(script):
    with pytest.raises(ValueError, match="step='four': allowed are one, two, three"):
        script.text("four")
    with pytest.raises(ValueError, match="step='one': it is the first"):
        script.changes("one")
    with pytest.raises(ValueError, match="name='less': step two has main, more"):
        script.show("two", "less")
