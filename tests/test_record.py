"""Recordings: their contents, their validity, and their description on the pages."""

from __future__ import annotations

import subprocess
import sys

import nbformat
import pytest
from throwaway import HEADER, Book

from shardcourse import build
from shardlab.common.show.timing import BUSY_TEXT, UNSEEN_PREFIX


@pytest.fixture
def book(tmp_path):
    return Book(tmp_path)


def list_key_files(book):
    return set(build.compute_key("small", book.root).files)


# --- The key ----------------------------------------------------------------------------------


def test_key_holds_what_the_cells_reach(book):
    assert list_key_files(book) == {
        "code/shardlab/__init__.py",
        "code/shardlab/first.py",
        "code/shardlab/second.py",
    }


@pytest.mark.parametrize(
    ("cell", "path"),
    [
        ("import shardlab.third", "code/shardlab/third.py"),
        ("import importlib; importlib.import_module('shardlab.third')", "code/shardlab/third.py"),
        ("from shardlab import package", "code/shardlab/package/inner.py"),
        ("from shardlab.package import inner", "code/shardlab/package/inner.py"),
        ("open('../figures/data.csv')", "figures/data.csv"),
        ("import runpy; runpy.run_path('../figures/draw.py')", "figures/helper.py"),
        ("from benchmarks import bench", "benchmarks/bench.py"),
        ("from shardcourse import exercises", "code/shardcourse/exercises/small.py"),
    ],
)
def test_key_follows_imports_and_paths(book, cell, path):
    book.write("code/shardlab/package/__init__.py", "from . import inner\n")
    book.write("code/shardlab/package/inner.py", "from .. import first\n")
    book.write("code/shardcourse/__init__.py", "")
    book.write("code/shardcourse/exercises/__init__.py", "")
    book.write("code/shardcourse/exercises/small.py", "")
    book.write("code/shardcourse/exercises/other.py", "")
    book.write("figures/data.csv", "1,2\n")
    book.write("figures/draw.py", "import helper\n")
    book.write("figures/helper.py", "")
    book.write("benchmarks/bench.py", "")
    assert path not in list_key_files(book)
    book.edit("lessons/small.md", 'print("the answer is"', f'{cell}\nprint("the answer is"')
    assert path in list_key_files(book)
    assert "code/shardcourse/exercises/other.py" not in list_key_files(book)


@pytest.mark.parametrize(
    ("name", "old", "new", "same"),
    [
        ("lessons/small.md", "one thing", "another thing", True),
        ("lessons/small.md", "[hide-input]", "[hide-input, raises-exception]", False),
        ("lessons/small.md", "the answer is", "the answer was", False),
        ("lessons/small.md", "import answer\n", "import answer  # why\n", False),
        ("code/shardlab/second.py", "42", "41", False),
        ("code/shardlab/second.py", "42", "42  # why", False),
        ("code/shardlab/third.py", "43", "44", True),
    ],
)
def test_key_changes_with_what_outputs_depend_on(book, name, old, new, same):
    before = build.compute_key("small", book.root).digest
    book.edit(name, old, new)
    assert (build.compute_key("small", book.root).digest == before) is same
    book.edit(name, new, old)
    assert build.compute_key("small", book.root).digest == before


def test_key_says_what_changed(book):
    lesson = build.execute_page("small", book.root)
    assert build.list_outdated_reasons(lesson, "small", book.root) == []
    book.edit("lessons/small.md", "the answer is", "the answer was")
    book.edit("code/shardlab/second.py", "42", "41")
    book.edit("code/shardlab/first.py", "from", "from .third import VALUE as _\nfrom")
    assert build.list_outdated_reasons(lesson, "small", book.root) == [
        "code cell 2 changed",
        "code/shardlab/first.py changed",
        "code/shardlab/second.py changed",
        "code/shardlab/third.py is used now",
    ]
    book.edit("lessons/small.md", "# A small lesson\n", "# A small lesson\n\n```{code-cell}\n```\n")
    assert "3 code cells instead of 2" in build.list_outdated_reasons(lesson, "small", book.root)


def test_recording_that_was_edited_or_cut_does_not_hold(book):
    book.record_lesson()
    text = book.recording.read_text()
    assert (
        build.list_outdated_reasons(build.load_recording(book.recording), "small", book.root) == []
    )
    book.recording.write_text(text.replace("the answer is", "another cell"))
    assert build.list_outdated_reasons(
        build.load_recording(book.recording), "small", book.root
    ) == ["code cell 2 changed"]
    for broken in (text[:-100], "", "{}", "[]"):
        book.recording.write_text(broken)
        assert build.load_recording(book.recording) is None
    assert build.load_recording(book.root / "none.ipynb") is None


# --- Executing --------------------------------------------------------------------------------


def test_recording_holds_code_cells_outputs_and_where_it_was_made(book, no_leftovers):
    lesson = build.execute_page("small", book.root)
    nbformat.validate(lesson)
    assert [cell.cell_type for cell in lesson.cells] == ["code", "code"]
    assert lesson.cells[-1].outputs[0].text == "the answer is 42\n"
    about = build.get_metadata(lesson)
    assert about["device"]["kind"] == "cpu"
    assert about["device"]["cores"] >= 1
    assert about["versions"]["python"] == sys.version.split()[0]
    assert about["seconds"] > 0
    assert about["ranks"] == []
    assert build.execute_page("small", book.root).cells == lesson.cells  # including ids


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("1 / 0", "ZeroDivisionError, line 1: division by zero\n    | 1 / 0"),
        ("import os; os._exit(3)", "its kernel died"),
    ],
)
def test_failing_cell_is_named(book, cell, words, no_leftovers):
    meant = "```{code-cell} ipython3\n:tags: [raises-exception]\n\n1 / 0\n```\n"
    measures = f"```{{code-cell}} ipython3\n:tags: [measured]\n\n{cell}\n```\n"
    book.write("lessons/small.md", f"{HEADER}# T\n\n{meant}\n{measures}")
    with pytest.raises(build.LessonError) as caught:
        build.execute_page("small", book.root)
    assert str(caught.value).startswith(f"lessons/small.md, code cell 2 of 2: {words}")


def test_recording_counts_the_ranks_that_ran(book, root, no_leftovers):
    cell = "from shardlab import ranks\nranks.run(print, 2, device='cpu')\nranks.run(print, 3)"
    book.write("lessons/small.md", f"{HEADER}# T\n\n```{{code-cell}} ipython3\n{cell}\n```\n")
    (book.root / "code/shardlab").rename(book.root / "away")
    (book.root / "code/shardlab").symlink_to(root / "code/shardlab")
    ran = build.get_metadata(build.execute_page("small", book.root, cpu=True))["ranks"]
    assert ran == [
        {"ranks": 2, "backend": "gloo", "device": "cpu", "runs": 1},
        {"ranks": 3, "backend": "gloo", "device": "cpu", "runs": 1},
    ]


def test_a_cell_has_a_limit(book, monkeypatch):
    cell = "import time; time.sleep(20)"
    book.write("lessons/small.md", f"{HEADER}# T\n\n```{{code-cell}} ipython3\n{cell}\n```\n")
    monkeypatch.setattr("shardcourse.build.kernel.CELL_TIMEOUT_SECONDS", 1)
    with pytest.raises(build.LessonError, match=r"small\.md, code cell 1 .*not end within 1 s"):
        build.execute_page("small", book.root)


def make_claim_cell(needed, why):
    """Return a cell that makes a claim on time, which first holds in try number `needed`."""
    return f"""```{{code-cell}} ipython3
tries = globals().get("tries", 0) + 1
print(tries)
if tries < {needed}:
    print({f"{UNSEEN_PREFIX}ours is faster ({why})"!r})
```
"""


def test_a_cell_whose_times_are_not_what_it_claims_has_three_tries(book):
    seen, busy = make_claim_cell(3, "a quiet machine"), make_claim_cell(7, BUSY_TEXT)
    book.write("lessons/small.md", f"{HEADER}# T\n\n{seen}\n{busy}")
    lesson = build.execute_page("small", book.root)
    assert build.get_metadata(lesson)["again"] == [1, 1, 2, 2]
    first, second = (cell.outputs[0].text for cell in lesson.cells)
    assert first == "3\n" and second.startswith("6\n") and UNSEEN_PREFIX in second
    book.write("lessons/small.md", f"{HEADER}# T\n\n{make_claim_cell(4, 'a quiet machine')}")
    with pytest.raises(build.LessonError, match="3 times: .*ours is faster"):
        build.execute_page("small", book.root)


# --- Opened files -----------------------------------------------------------------------------

# Names that no source contains, so that reading sources cannot find them.
SEEN = """import os, pathlib, subprocess, sys
open('../kept/' + 'joined' + '.json').read()
for path in pathlib.Path('../kept').glob('l*'):
    path.read_text()
if not (child := os.fork()):
    open('../kept/' + 'forked' + '.json').read()
    os._exit(0)
os.waitpid(child, 0)
code = "open('/'.join(['..', 'kept', 'other' + '.json']))"
subprocess.run([sys.executable, '-c', code], check=True)
open('../kept/' + 'written', 'w').close()
open('../kept/' + 'written').read()"""
KEPT = [f"kept/{name}.json" for name in ("forked", "joined", "looped", "other")]


def test_key_holds_what_a_run_opens(book):
    """The key has files opened by a joined path, in a loop, a fork, a child; not written files."""
    book.write("lessons/small.md", f"{HEADER}# T\n\n```{{code-cell}} ipython3\n{SEEN}\n```\n")
    for name in KEPT:
        book.write(name, "[1.0]")
    lesson = build.execute_page("small", book.root)
    assert build.get_metadata(lesson)["opened"] == KEPT
    assert build.list_outdated_reasons(lesson, "small", book.root) == []
    book.write(KEPT[0], "[0.5]")
    (book.root / KEPT[3]).unlink()
    assert build.list_outdated_reasons(lesson, "small", book.root) == [
        f"{KEPT[0]} changed",
        f"{KEPT[3]} is used no more",
    ]


# --- The command line -------------------------------------------------------------------------


def run_command(book, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "shardlab", *arguments],
        cwd=book.root,
        capture_output=True,
        text=True,
    )


def test_record_goes_on_after_a_failure_and_keeps_the_old_recording(book):
    book.record_lesson()
    before = book.recording.read_bytes()
    book.write("lessons/other.md", (book.root / "lessons/small.md").read_text())
    book.edit("lessons/small.md", "answer())", "1 / 0)")
    done = run_command(book, "record", "small", "other")
    assert done.returncode == 1
    assert "lessons/small.md, code cell 2 of 2: ZeroDivisionError" in done.stderr
    assert book.recording.read_bytes() == before
    assert book.recording.with_name("other.ipynb").exists()


# --- The build --------------------------------------------------------------------------------


def test_the_build_takes_a_recording_as_long_as_it_holds_and_executes_else(book):
    book.build_checked()
    assert book.executed_lessons == ["small"]
    assert "Executed by this build on the CPU" in book.read_page()

    book.edit("lessons/small.md", "one thing", "another thing")
    book.build_checked()
    assert book.executed_lessons == []
    assert "another thing" in book.read_page()

    # A later recording is used, although no page changed.
    book.record_lesson(device="Imaginary Z9", output="recorded output\n")
    book.build_checked()
    page = book.read_page()
    assert book.executed_lessons == []
    assert "Recorded on 2 × Imaginary Z9 (driver 999.1), up to 4 ranks on the GPU (gloo)" in page
    assert "recorded output" in page
    assert "Imaginary Z9" in book.read_page("book/execution")

    book.edit("code/shardlab/second.py", "42", "41")  # imported by an imported file
    book.build_checked()
    page = book.read_page()
    assert book.executed_lessons == ["small"]
    assert "Executed by this build on the CPU" in page
    assert "A recording is out of date: code/shardlab/second.py changed." in page
    assert "the answer is 41" in page
    assert "Imaginary Z9" not in page
    assert "code/shardlab/second.py changed" in book.read_page("book/execution")

    book.edit("code/shardlab/second.py", "41", "42")
    book.build_checked(RECORDED="0")
    assert book.executed_lessons == ["small"]
    assert "the answer is 42" in book.read_page()
    assert "Recorded on" not in book.read_page()

    book.write("code/shardlab/second/__init__.py", "VALUE = 40")  # a package goes before a module
    book.build_checked(RECORDED="0")
    assert book.executed_lessons == ["small"]
    assert "the answer is 40" in book.read_page()


def test_failing_cell_fails_the_build_every_time(book):
    book.write("lessons/fine.md", (book.root / "lessons/small.md").read_text())
    book.edit(
        "_toc.yml", "  - file: lessons/small\n", "  - file: lessons/small\n  - file: lessons/fine\n"
    )
    book.edit("lessons/fine.md", "the answer is", "all is well:")
    book.edit("lessons/small.md", "answer())", "1 / 0)")
    for executed in (["fine"], []):  # good outputs are kept at once
        assert book.build() != 0
        last = book.log.splitlines()[-1]  # regardless of other output, and of the cell's length
        assert last.startswith("lessons/small.md, code cell 2 of 2: ZeroDivisionError")
        assert book.executed_lessons == executed
