"""A file of the package that changed after its import is noticed, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("call", ["ranks.run(rank, 1)", "show.source(shardlab.added)"])
def test_a_changed_file_is_named_once(call, package):
    added = package / "added.py"
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    program = PROGRAM.format(first="torch", call=call)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    words = "has changed since it was imported: restart the kernel to run the new code"
    assert done.stderr == f"{added} {words}\n"
