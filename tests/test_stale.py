"""A file of the package that changed after its import is noticed, once."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardlab import ranks
from shardlab.common import show, stale, text

PROGRAM = """
import pathlib, sys, {first}
from shardlab import ranks
from shardlab.common import show, stale
import shardlab.added
path = pathlib.Path(shardlab.added.__file__)
def rank():
    return shardlab.added.value()
for edit in ("", "# more\\n", "# and more\\n"):
    if edit:
        path.write_text(path.read_text() + edit)
    {call}
"""


@pytest.fixture
def package(tmp_path: Path, root: Path) -> Path:
    """The course's package with a module of its own, which may be edited."""
    folder = tmp_path / "shardlab"
    folder.mkdir()
    for path in (root / "code/shardlab").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "added.py").write_text("def value():\n    return 1\n")
    return folder


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("call", ["ranks.run(rank, 1)", "show.source(shardlab.added)"])
def test_a_changed_file_is_named_once(call, written, package):
    added = package / "added.py"
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    if not written:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    program = PROGRAM.format(first="torch", call=call)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    words = "has changed since it was imported: restart the kernel to run the new code"
    assert done.stderr == f"{added} {words}\n"


def test_nothing_is_said_where_nothing_changed(capfd):
    ranks.run(lambda: None, 1)
    show.source(text.batch)
    assert stale.changed() == []
    assert "has changed" not in "".join(capfd.readouterr())


def test_a_module_that_is_loaded_again_is_as_new(tmp_path, monkeypatch):
    path = tmp_path / "again.py"
    path.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(stale, "PACKAGES", ("again",))
    monkeypatch.setattr(stale, "_BEGIN", time.time() - 3600)
    module = importlib.import_module("again")
    assert stale.changed() == []
    path.write_text("x = 1\ny = 2\n")
    assert stale.changed() == [str(path)]
    importlib.reload(module)
    assert stale.changed() == []
    del sys.modules["again"]


def test_it_costs_next_to_nothing():
    stale.changed()
    begin = time.process_time()  # this process's: tests beside it take none of that
    for _ in range(10):
        stale.changed()
    assert time.process_time() - begin < 0.5  # 0.5 ms each on a quiet machine
