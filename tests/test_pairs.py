"""Lessons and their scripts have the same contents, and scripts are generated one way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import without_jupyter
from jupytext.cli import jupytext
from throwaway import Book

from shardcourse import build
from shardcourse.build import pairs
from shardtools import __main__


def test_what_is_made_is_in_step(root):
    late = [str(path.relative_to(root)) for path in pairs.find_outdated(root)]
    assert late == [], "run `make pairs`"


# The script as the main program, without its own assertions.
AS_MAIN = """
import sys
script = sys.argv[1]
sys.path[0] = script.rpartition("/")[0]
exec(compile(open(script, encoding="utf-8").read(), script, "exec", optimize=1))
"""


@pytest.mark.timeout(1200)  # a lesson takes a minute on two free cores
def test_scripts_run_without_jupyter(root, tmp_path, request):
    """`python code/lessons/<topic>.py` ends with 0, from any folder; two scripts at a time.

    Without --weekly, test_torchrun.py runs one such script, as set-up prints it.

    The assertions of cells are checked when the book executes them, with the machine to themselves:
    here one lesson would disturb the times that the other asserts.
    """
    if not request.config.getoption("--weekly"):
        pytest.skip("every lesson takes a minute: --weekly")
    environment = without_jupyter(tmp_path) | {"OMP_NUM_THREADS": "1"}

    def run_script(topic):
        return subprocess.run(
            [sys.executable, "-c", AS_MAIN, root / "code/lessons" / f"{topic}.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    topics = build.list_lessons(root)
    with ThreadPoolExecutor(2) as pool:
        for topic, done in zip(topics, pool.map(run_script, topics), strict=True):
            assert done.returncode == 0, topic + done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("newer", ["lessons", "code/lessons"])
def test_jupytext_finds_every_pair_in_step(root, tmp_path, monkeypatch, newer):
    """Whichever file of a pair a clone has written last, jupytext --sync changes none."""
    folders = "lessons", "code/lessons"
    for folder in folders:
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.ipynb"))
    shutil.copy(root / "jupytext.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for folder in folders for path in Path(folder).glob("*.*")}
    for path in before:
        age = 0 if path.parent == Path(newer) else 60
        os.utime(path, (time.time() - age,) * 2)
    jupytext(["--quiet", "--sync", *map(str, Path("lessons").glob("*.md"))])
    assert [str(path) for path, text in before.items() if path.read_bytes() != text] == []


def test_pairs_go_one_way(tmp_path, monkeypatch, capsys):
    book = Book(tmp_path)
    monkeypatch.chdir(book.root)
    script = book.root / "code/lessons/small.py"
    lesson = (book.root / "lessons/small.md").read_bytes()
    assert __main__.main(["pairs", "--check"]) == 1
    assert "code/lessons/small.py differs from its source" in capsys.readouterr().out
    assert not script.exists()
    assert __main__.main(["pairs"]) == 0
    assert __main__.main(["pairs", "--check"]) == 0

    # A newer script does not replace its lesson, and one without a lesson is removed.
    script.write_text("print('edited here')\n")
    (script.parent / "gone.py").write_text("")
    assert __main__.main(["pairs", "--check"]) == 1
    assert "gone.py has no lesson" in capsys.readouterr().out
    assert __main__.main(["pairs"]) == 0
    assert "edited here" not in script.read_text()
    assert (book.root / "lessons/small.md").read_bytes() == lesson
    assert not (script.parent / "gone.py").exists()
